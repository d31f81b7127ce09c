//! Namespace and name of each pod of this node, from the directories the kubelet keeps the pods' logs in: `NAMESPACE_NAME_UID`. No API server is
//! asked and no right is needed but to read that directory.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;

/// Most pods; a node has some hundred at most.
const MOST: usize = 4096;

/// A pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// The pods of this node, by uid.
#[derive(Debug, Default)]
pub struct Pods {
    directory: Option<PathBuf>,
    by_uid: HashMap<String, Pod>,
    /// It was said that the directory cannot be read.
    said: bool,
}

impl Pods {
    /// Those whose logs lie there.
    #[must_use]
    pub fn of(directory: Option<PathBuf>) -> Self {
        Self { directory, by_uid: HashMap::new(), said: false }
    }

    /// Looks which there are now.
    pub fn read(&mut self) {
        let Some(directory) = &self.directory else { return };
        let entries = fs::read_dir(directory);
        if let Err(error) = &entries
            && !std::mem::replace(&mut self.said, true)
        {
            let directory = directory.display();
            tracing::warn!(%directory, %error, "rules name pods, and no pod's name is known: no pod is recorded");
        }
        let names = entries.into_iter().flatten().flatten().take(MOST).map(|entry| entry.file_name());
        self.by_uid = names.filter_map(|name| parse(name.to_str()?)).collect();
    }

    /// The pod with this uid.
    #[must_use]
    pub fn get(&self, uid: &str) -> Option<&Pod> {
        self.by_uid.get(uid)
    }
}

/// Uid and pod of a directory of logs. Neither names nor uids have underscores.
fn parse(directory: &str) -> Option<(String, Pod)> {
    let mut parts = directory.split('_');
    let (namespace, name, uid) = (parts.next()?, parts.next()?, parts.next()?);
    let whole = parts.next().is_none() && ![namespace, name, uid].contains(&"");
    whole.then(|| (uid.to_owned(), Pod { namespace: namespace.to_owned(), name: name.to_owned() }))
}

/// The uid of the pod a cgroup belongs to: `…/kubepods-burstable-podUID.slice/…` with underscores where systemd makes the names,
/// `/kubepods/burstable/podUID/…` where the kubelet does.
#[must_use]
pub fn pod_uid(cgroup: &str) -> Option<String> {
    cgroup.split('/').rev().find_map(|part| {
        let part = part.strip_suffix(".slice").unwrap_or(part);
        let uid = match part.strip_prefix("kubepods") {
            Some(rest) => rest.rsplit_once("-pod")?.1,
            None => part.strip_prefix("pod")?,
        };
        let uid = uid.replace('_', "-");
        // 36 with dashes; 32 for pods the kubelet reads from files.
        let is_uid = matches!(uid.len(), 32 | 36) && uid.bytes().all(|c| c.is_ascii_hexdigit() || c == b'-');
        is_uid.then_some(uid)
    })
}

#[cfg(test)]
mod tests {
    use super::{Pod, parse, pod_uid};

    const UID: &str = "11111111-2222-3333-4444-555555555555";

    #[test]
    fn both_ways_to_name_a_pods_cgroup_are_known() {
        let systemd = UID.replace('-', "_");
        for path in [
            format!(
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{systemd}.slice/cri-x.scope"
            ),
            format!("/kubepods.slice/kubepods-pod{systemd}.slice"),
            format!("/kubepods/besteffort/pod{UID}/0123"),
            format!("/kubelet.slice/kubelet-kubepods.slice/kubepods/pod{UID}"),
        ] {
            assert_eq!(pod_uid(&path).as_deref(), Some(UID), "{path}");
        }
        for path in ["/system.slice/podman.service", "/kubepods/podcast", "/"] {
            assert_eq!(pod_uid(path), None, "{path}");
        }
    }

    #[test]
    fn a_directory_of_logs_names_its_pod() {
        let pod = Pod { namespace: "shop".to_owned(), name: "web-7d9".to_owned() };
        assert_eq!(parse(&format!("shop_web-7d9_{UID}")), Some((UID.to_owned(), pod)));
        for other in ["shop_web", "a_b_c_d", "__x", "lost+found"] {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
