//! The table of pods, by the uid their cgroups have. Whoever learns of pods writes it; rules, names
//! of services and labels read it.

use perfusion_model::labels::PodLabels;
use perfusion_model::text::printable;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// A pod that says `off` here is neither recorded nor attached to.
pub const PROFILE: &str = "perfusion/profile";
/// A pod that says `off` here is not attached to.
pub const ATTACH: &str = "perfusion/attach";
/// Labels that name a pod's application, in the order they count.
pub const APP: [&str; 2] = ["app.kubernetes.io/name", "app"];

/// Most pods; a node has some hundred at most.
const MOST: usize = 4096;
/// How long a pod that is gone is remembered: its last values are labelled when their window ends.
const KEEP_GONE: Duration = Duration::from_secs(600);
/// Characters of a label's value that are shown.
const SHOWN_CHARACTERS: usize = 200;

/// A pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pod {
    /// As the API server knows it.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Where it runs.
    pub node: Option<String>,
    /// Those of its labels that matter here.
    pub labels: BTreeMap<String, String>,
    /// Likewise.
    pub annotations: BTreeMap<String, String>,
    /// Names of containers, by id.
    pub containers: HashMap<String, String>,
}

impl Pod {
    /// The application it says it belongs to.
    #[must_use]
    pub fn app(&self) -> Option<&str> {
        APP.iter()
            .filter_map(|key| self.labels.get(*key))
            .map(String::as_str)
            .find(|app| !app.is_empty())
    }

    /// True when it wants to be neither recorded nor attached to.
    #[must_use]
    pub fn wants_no_profile(&self) -> bool {
        self.says_off(PROFILE)
    }

    /// True when it does not want to be attached to.
    #[must_use]
    pub fn wants_no_shim(&self) -> bool {
        self.says_off(ATTACH) || self.wants_no_profile()
    }

    fn says_off(&self, annotation: &str) -> bool {
        // What else YAML's `off` may have become on its way here.
        self.annotations.get(annotation).is_some_and(|value| {
            ["off", "false", "no"].iter().any(|word| value.trim().eq_ignore_ascii_case(word))
        })
    }
}

/// Which labels and annotations samples show.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShownPodLabels {
    /// Keys of labels.
    pub labels: Vec<String>,
    /// Keys of annotations.
    pub annotations: Vec<String>,
}

impl ShownPodLabels {
    /// What samples of a container show.
    #[must_use]
    pub fn of(&self, pod: &Pod, container: Option<&str>) -> PodLabels {
        let clean = |text: &str| printable(text).chars().take(SHOWN_CHARACTERS).collect::<String>();
        let mut shown = Vec::new();
        let mut show = |name: &str, value: &str| shown.push((name.to_owned(), clean(value)));
        show("k8s.namespace.name", &pod.namespace);
        show("k8s.pod.name", &pod.name);
        show("k8s.pod.uid", &pod.uid);
        if let Some(name) = container.and_then(|id| pod.containers.get(id)) {
            show("k8s.container.name", name);
        }
        for (kind, keys, values) in [
            ("label", &self.labels, &pod.labels),
            ("annotation", &self.annotations, &pod.annotations),
        ] {
            for key in keys {
                if let Some(value) = values.get(key) {
                    show(&format!("k8s.pod.{kind}.{key}"), value);
                }
            }
        }
        PodLabels { uid: pod.uid.clone(), shown }
    }
}

/// The pods of this node.
#[derive(Debug, Default)]
pub struct Pods {
    all: RwLock<PodTable>,
}

#[derive(Debug, Default)]
struct PodTable {
    by_uid: HashMap<String, PodEntry>,
    shown: Arc<ShownPodLabels>,
    /// How often a pod came or became another.
    changes: u64,
}

#[derive(Debug)]
struct PodEntry {
    pod: Arc<Pod>,
    /// Since when it is gone.
    gone: Option<Instant>,
}

impl Pods {
    /// The pod whose cgroup has this uid; also one that was gone a moment ago.
    #[must_use]
    pub fn get(&self, uid: &str) -> Option<Arc<Pod>> {
        self.read().by_uid.get(uid).map(|entry| Arc::clone(&entry.pod))
    }

    /// Pods that are there.
    #[must_use]
    pub fn count(&self) -> usize {
        self.read().by_uid.values().filter(|entry| entry.gone.is_none()).count()
    }

    /// How often a pod came or changed what it says of itself: rules may say something else of it
    /// since.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.read().changes
    }

    /// Which labels samples show.
    #[must_use]
    pub fn shown(&self) -> Arc<ShownPodLabels> {
        Arc::clone(&self.read().shown)
    }

    /// They show these from now on.
    pub fn show(&self, shown: ShownPodLabels) {
        self.write().shown = Arc::new(shown);
    }

    /// There is such a pod. Those beyond the limit are not known.
    pub fn put(&self, uid: String, pod: Pod, now: Instant) {
        let mut all = self.write();
        forget(&mut all, now);
        put(&mut all, uid, pod);
    }

    /// This pod is there no more.
    pub fn remove(&self, uid: &str, pod: &Pod, now: Instant) {
        if let Some(entry) =
            self.write().by_uid.get_mut(uid).filter(|entry| entry.pod.uid == pod.uid)
        {
            entry.gone.get_or_insert(now);
        }
    }

    /// These are all there are.
    pub fn replace(&self, pods: Vec<(String, Pod)>, now: Instant) {
        let mut all = self.write();
        let there: HashSet<(&String, &String)> =
            pods.iter().map(|(uid, pod)| (uid, &pod.uid)).collect();
        for (uid, entry) in &mut all.by_uid {
            if !there.contains(&(uid, &entry.pod.uid)) {
                entry.gone.get_or_insert(now);
            }
        }
        forget(&mut all, now);
        for (uid, pod) in pods {
            put(&mut all, uid, pod);
        }
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, PodTable> {
        self.all.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, PodTable> {
        self.all.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn put(all: &mut PodTable, uid: String, pod: Pod) {
    let full = all.by_uid.len() >= MOST;
    match all.by_uid.get_mut(&uid) {
        // Whoever makes a pod chooses its annotations, and by them it could say that it is this
        // one.
        Some(entry) if entry.gone.is_none() && entry.pod.uid != pod.uid => {
            tracing::warn!(
                uid,
                "two pods say that a cgroup is theirs: the one that was known first has it"
            );
        }
        // What is unchanged stays the same one.
        Some(entry) => {
            entry.gone = None;
            if *entry.pod != pod {
                entry.pod = Arc::new(pod);
                all.changes += 1;
            }
        }
        None if full => tracing::warn!("more than {MOST} pods: those beyond are not known"),
        None => {
            all.by_uid.insert(uid, PodEntry { pod: Arc::new(pod), gone: None });
            all.changes += 1;
        }
    }
}

fn forget(all: &mut PodTable, now: Instant) {
    all.by_uid
        .retain(|_, entry| entry.gone.is_none_or(|gone| now.duration_since(gone) < KEEP_GONE));
}

#[cfg(test)]
mod tests {
    use super::{KEEP_GONE, MOST, Pod, Pods, ShownPodLabels};
    use std::collections::{BTreeMap, HashMap};
    use std::time::Instant;

    fn pod(name: &str) -> Pod {
        Pod {
            name: name.to_owned(),
            namespace: "shop".to_owned(),
            uid: "u".to_owned(),
            ..Pod::default()
        }
    }

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_pod_that_just_died_is_remembered_for_a_while() {
        let (pods, start) = (Pods::default(), Instant::now());
        pods.put("a".to_owned(), pod("a"), start);
        pods.put("b".to_owned(), pod("b"), start);
        pods.remove("a", &pod("a"), start);
        assert_eq!(
            (pods.count(), pods.get("a").map(|pod| pod.name.clone()).as_deref()),
            (1, Some("a"))
        );
        // A list without it means the same.
        pods.replace(vec![("c".to_owned(), pod("c"))], start);
        assert_eq!((pods.count(), pods.get("b").is_some()), (1, true));
        pods.replace(vec![("c".to_owned(), pod("c"))], start + KEEP_GONE);
        assert!(pods.get("a").is_none() && pods.get("b").is_none() && pods.get("c").is_some());
    }

    #[test]
    fn a_pod_that_is_there_has_its_place_to_itself() {
        let (pods, now) = (Pods::default(), Instant::now());
        let other = || Pod { uid: "v".to_owned(), ..pod("other") };
        let name = || pods.get("a").unwrap().name.clone();
        pods.put("a".to_owned(), pod("own"), now);
        pods.put("a".to_owned(), other(), now);
        pods.remove("a", &other(), now);
        assert_eq!((name().as_str(), pods.count()), ("own", 1));
        pods.replace(vec![("a".to_owned(), other()), ("a".to_owned(), pod("own"))], now);
        assert_eq!(name(), "own");
        // The image of a pod from a file can be made anew: the pod has the same cgroup, and the
        // image another uid.
        pods.remove("a", &pod("own"), now);
        pods.put("a".to_owned(), other(), now);
        assert_eq!(name(), "other");
        pods.replace(vec![("a".to_owned(), pod("own"))], now);
        assert_eq!((name().as_str(), pods.count()), ("own", 1));
    }

    #[test]
    fn there_is_room_for_so_many_and_what_is_known_can_change() {
        let (pods, now) = (Pods::default(), Instant::now());
        pods.replace((0..MOST + 1).map(|n| (n.to_string(), pod("x"))).collect(), now);
        assert_eq!((pods.count(), pods.changes()), (MOST, MOST as u64));
        pods.put("0".to_owned(), pod("renamed"), now);
        assert_eq!(
            (pods.get("0").unwrap().name.as_str(), pods.changes()),
            ("renamed", MOST as u64 + 1)
        );
        pods.put("0".to_owned(), pod("renamed"), now);
        assert_eq!(pods.changes(), MOST as u64 + 1, "nothing new");
    }

    #[test]
    fn the_recommended_label_names_the_application_before_the_old_one() {
        let of = |labels: &[(&str, &str)]| {
            Pod { labels: map(labels), ..pod("x") }.app().map(str::to_owned)
        };
        assert_eq!(of(&[("app", "a"), ("app.kubernetes.io/name", "b")]).as_deref(), Some("b"));
        assert_eq!(of(&[("app", "a")]).as_deref(), Some("a"));
        assert_eq!([of(&[]), of(&[("app", "")])], [None, None]);
    }

    #[test]
    fn a_pod_opts_out_of_everything_or_of_the_shim() {
        let of = |annotations: &[(&str, &str)]| Pod { annotations: map(annotations), ..pod("x") };
        let both = of(&[("perfusion/profile", "Off")]);
        assert!(both.wants_no_profile() && both.wants_no_shim());
        let shim = of(&[("perfusion/attach", "false")]);
        assert!(!shim.wants_no_profile() && shim.wants_no_shim());
        let neither = of(&[("perfusion/profile", "on"), ("perfusion/attach", "")]);
        assert!(!neither.wants_no_profile() && !neither.wants_no_shim());
    }

    #[test]
    fn samples_show_who_they_are_of_and_only_what_was_asked_for() {
        let pod = Pod {
            labels: map(&[("team", "a\u{1b}"), ("app", "x")]),
            annotations: map(&[("owner", "o")]),
            containers: HashMap::from([("id".to_owned(), "main".to_owned())]),
            ..pod("web")
        };
        let keys = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let shown =
            ShownPodLabels { labels: keys(&["team", "absent"]), annotations: keys(&["owner"]) };
        let of = |id: &str| {
            let labels = shown.of(&pod, Some(id)).shown;
            labels
                .into_iter()
                .map(|(name, value)| format!("{name}={value}"))
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(
            of("id"),
            "k8s.namespace.name=shop k8s.pod.name=web k8s.pod.uid=u k8s.container.name=main \
             k8s.pod.label.team=a\u{fffd} k8s.pod.annotation.owner=o"
        );
        assert!(!of("another").contains("k8s.container.name"));
    }
}
