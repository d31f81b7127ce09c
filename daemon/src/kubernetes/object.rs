//! What of the API server's JSON is read (Kubernetes API, core/v1 Pod; meta/v1 WatchEvent,
//! ListMeta, Status): a dozen fields of hundreds. All else is skipped without being kept.

use perfusion_host::pods::Pod;
use perfusion_host::pods::{APP, ATTACH, PROFILE};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// By this annotation of the kubelet's the API server's image of a pod from a file has the uid that
/// its cgroup has.
const CONFIG_HASH: &str = "kubernetes.io/config.hash";
/// And this one says that it is such an image.
const CONFIG_MIRROR: &str = "kubernetes.io/config.mirror";

/// Answer to a list.
#[derive(Debug, Deserialize)]
pub struct PodList {
    /// Of the list.
    pub metadata: ListMeta,
    /// The pods.
    #[serde(default)]
    pub items: Vec<PodObject>,
}

/// What is known of a list.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ListMeta {
    /// Where a watch goes on from.
    pub resource_version: String,
    /// Where the rest of the list is; empty or absent when that was all.
    #[serde(rename = "continue")]
    pub rest: Option<String>,
}

/// Kind of a line of a watch.
#[derive(Debug, Deserialize)]
pub struct WatchEventType {
    /// ADDED, MODIFIED, DELETED, BOOKMARK or ERROR.
    #[serde(rename = "type")]
    pub kind: String,
}

/// The object of a line of a watch.
#[derive(Debug, Deserialize)]
pub struct WatchEventObject<T> {
    /// A pod, or what went wrong.
    pub object: T,
}

/// What went wrong.
#[derive(Debug, Default, Deserialize)]
pub struct ApiFailure {
    /// An HTTP status.
    #[serde(default)]
    pub code: u16,
    /// In words.
    #[serde(default)]
    pub message: String,
}

/// A pod.
#[derive(Debug, Deserialize)]
pub struct PodObject {
    /// Its names.
    pub metadata: ObjectMeta,
    #[serde(default)]
    spec: PodSpec,
    #[serde(default)]
    status: PodStatus,
}

/// The names of an object. A bookmark has nothing but its version.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectMeta {
    #[serde(default)]
    name: String,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    uid: String,
    /// Where a watch goes on from.
    #[serde(default)]
    pub resource_version: String,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodSpec {
    node_name: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodStatus {
    container_statuses: Option<Vec<ContainerStatus>>,
    init_container_statuses: Option<Vec<ContainerStatus>>,
    ephemeral_container_statuses: Option<Vec<ContainerStatus>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ContainerStatus {
    name: String,
    /// `containerd://` and 64 digits; absent before it was made.
    #[serde(rename = "containerID")]
    container_id: Option<String>,
}

/// Which labels and annotations are kept: they can be megabytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UsedKeys {
    /// Keys of labels.
    pub labels: BTreeSet<String>,
    /// Keys of annotations.
    pub annotations: BTreeSet<String>,
}

impl UsedKeys {
    /// These, and those that have a meaning here.
    #[must_use]
    pub fn with(mut self) -> Self {
        self.labels.extend(APP.map(str::to_owned));
        self.annotations.extend([PROFILE, ATTACH].map(str::to_owned));
        self
    }
}

impl PodObject {
    /// The pod, and the uid its cgroup has; `None` for one without names.
    #[must_use]
    pub fn pod(self, wanted: &UsedKeys) -> Option<(String, Pod)> {
        let ObjectMeta { name, namespace, uid, labels, mut annotations, .. } = self.metadata;
        if name.is_empty() || namespace.is_empty() || uid.is_empty() {
            return None;
        }
        let of_file = annotations.as_mut().and_then(of_file);
        let all = [
            self.status.container_statuses,
            self.status.init_container_statuses,
            self.status.ephemeral_container_statuses,
        ];
        let containers: HashMap<String, String> = all
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|container| {
                let id = container.container_id?;
                Some((id.rsplit_once("://")?.1.to_owned(), container.name))
            })
            .collect();
        let pod = Pod {
            uid,
            namespace,
            name,
            node: self.spec.node_name,
            labels: kept(labels, &wanted.labels),
            annotations: kept(annotations, &wanted.annotations),
            containers,
        };
        Some((of_file.unwrap_or_else(|| pod.uid.clone()), pod))
    }
}

/// The uid of the cgroup of a pod from a file, of its image's annotations. Whoever makes a pod can
/// write them: one of 36 characters, which pods that are from no file have, would be another pod's.
fn of_file(annotations: &mut BTreeMap<String, String>) -> Option<String> {
    let hash =
        annotations.remove(CONFIG_HASH).filter(|_| annotations.contains_key(CONFIG_MIRROR))?;
    (hash.len() == 32 && hash.bytes().all(|c| c.is_ascii_hexdigit())).then_some(hash)
}

fn kept(
    all: Option<BTreeMap<String, String>>,
    wanted: &BTreeSet<String>,
) -> BTreeMap<String, String> {
    let mut all = all.unwrap_or_default();
    all.retain(|key, _| wanted.contains(key));
    all
}

#[cfg(test)]
mod tests {
    use super::{ApiFailure, PodList, PodObject, UsedKeys, WatchEventObject, WatchEventType};
    use std::collections::BTreeSet;

    const UID: &str = "11111111-2222-3333-4444-555555555555";

    fn pod(text: &str, wanted: &UsedKeys) -> Option<(String, super::Pod)> {
        serde_json::from_str::<PodObject>(text).unwrap().pod(wanted)
    }

    #[test]
    fn a_pod_is_read_with_its_containers_and_only_the_labels_that_are_wanted() {
        let text = format!(
            r#"{{"kind":"Pod","metadata":{{"name":"web-1","namespace":"shop","uid":"{UID}",
            "resourceVersion":"7","labels":{{"app":"web","team":"a","huge":"x"}},
            "annotations":{{"perfusion/profile":"off","other":"y"}},"managedFields":[{{}}]}},
            "spec":{{"nodeName":"n1","containers":[{{"name":"c"}}]}},
            "status":{{"phase":"Running",
            "containerStatuses":[{{"name":"c","containerID":"containerd://abc"}},
            {{"name":"waiting"}}],
            "initContainerStatuses":[{{"name":"i","containerID":"cri-o://def"}}]}}}}"#
        );
        let wanted =
            UsedKeys { labels: BTreeSet::from(["team".to_owned()]), ..UsedKeys::default() }.with();
        let (uid, pod) = pod(&text, &wanted).unwrap();
        assert_eq!(
            (uid.as_str(), pod.name.as_str(), pod.namespace.as_str()),
            (UID, "web-1", "shop")
        );
        assert_eq!(pod.node.as_deref(), Some("n1"));
        assert_eq!(pod.labels.keys().collect::<Vec<_>>(), ["app", "team"]);
        assert_eq!(pod.annotations.keys().collect::<Vec<_>>(), ["perfusion/profile"]);
        assert_eq!((pod.containers["abc"].as_str(), pod.containers["def"].as_str()), ("c", "i"));
        assert_eq!(pod.containers.len(), 2);
    }

    #[test]
    fn a_pod_from_a_file_of_the_kubelets_has_the_uid_of_its_cgroup() {
        let text = format!(
            r#"{{"metadata":{{"name":"etcd-n1","namespace":"kube-system","uid":"{UID}",
            "annotations":{{"kubernetes.io/config.hash":"0123456789abcdef0123456789abcdef",
            "kubernetes.io/config.mirror":"x"}}}}}}"#
        );
        assert_eq!(pod(&text, &UsedKeys::default()).unwrap().0, "0123456789abcdef0123456789abcdef");
        assert_eq!(pod(r#"{"metadata":{"name":"a"}}"#, &UsedKeys::default()), None);
    }

    #[test]
    fn a_pod_does_not_take_the_uid_of_another_by_an_annotation() {
        let other = "66666666-7777-8888-9999-000000000000";
        let hash = "0123456789abcdef0123456789abcdef";
        for annotations in [
            format!(r#""kubernetes.io/config.hash":"{other}""#),
            format!(
                r#""kubernetes.io/config.hash":"{other}","kubernetes.io/config.mirror":"{other}""#
            ),
            format!(r#""kubernetes.io/config.hash":"{hash}""#),
        ] {
            let text = format!(
                r#"{{"metadata":{{"name":"a","namespace":"b","uid":"{UID}",
                "annotations":{{{annotations}}}}}}}"#
            );
            assert_eq!(pod(&text, &UsedKeys::default()).unwrap().0, UID, "{annotations}");
        }
    }

    #[test]
    fn lines_of_a_watch_carry_a_pod_a_version_or_a_failure() {
        let bookmark = r#"{"type":"BOOKMARK","object":{"kind":"Pod",
            "metadata":{"resourceVersion":"12","creationTimestamp":null},
            "spec":{"containers":null},"status":{}}}"#;
        assert_eq!(serde_json::from_str::<WatchEventType>(bookmark).unwrap().kind, "BOOKMARK");
        let carried: WatchEventObject<PodObject> = serde_json::from_str(bookmark).unwrap();
        assert_eq!(carried.object.metadata.resource_version, "12");
        let error = r#"{"type":"ERROR","object":{"kind":"Status","status":"Failure",
            "message":"too old resource version","reason":"Expired","code":410}}"#;
        let failure: WatchEventObject<ApiFailure> = serde_json::from_str(error).unwrap();
        assert_eq!(
            (failure.object.code, failure.object.message.as_str()),
            (410, "too old resource version")
        );
        let list: PodList = serde_json::from_str(
            r#"{"kind":"PodList","metadata":{"resourceVersion":"5"},"items":[]}"#,
        )
        .unwrap();
        assert_eq!((list.metadata.resource_version.as_str(), list.items.len()), ("5", 0));
    }
}
