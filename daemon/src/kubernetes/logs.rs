//! Namespace and name of each pod of this node, from the directories the kubelet keeps the pods'
//! logs in: `NAMESPACE_NAME_UID`. No API server is asked and no right is needed but to read that
//! directory.

use perfusion_host::pods::{Pod, Pods};
use std::fs;
use std::path::PathBuf;
use std::time::Instant;

/// The directory.
#[derive(Debug)]
pub struct PodLogs {
    directory: PathBuf,
    /// It was said that it cannot be read.
    said: bool,
}

impl PodLogs {
    /// Pods' logs lie there.
    #[must_use]
    pub fn of(directory: PathBuf) -> Self {
        Self { directory, said: false }
    }

    /// Looks which pods there are now. Where none is known, only those that need one, whose rules
    /// name pods, hear of it.
    pub fn read(&mut self, pods: &Pods, needed: bool) {
        let entries = fs::read_dir(&self.directory);
        if let Err(error) = &entries
            && needed
            && !std::mem::replace(&mut self.said, true)
        {
            let directory = self.directory.display();
            tracing::warn!(%directory, %error, "rules name pods, and no pod's name is known: no \
                 pod is recorded");
        }
        let names = entries.into_iter().flatten().flatten().map(|entry| entry.file_name());
        pods.replace(names.filter_map(|name| parse(name.to_str()?)).collect(), Instant::now());
    }
}

/// Uid and pod of a directory of logs. Neither names nor uids have underscores.
fn parse(directory: &str) -> Option<(String, Pod)> {
    let mut parts = directory.split('_');
    let (namespace, name, uid) = (parts.next()?, parts.next()?, parts.next()?);
    let whole = parts.next().is_none() && ![namespace, name, uid].contains(&"");
    let pod = Pod {
        uid: uid.to_owned(),
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        ..Pod::default()
    };
    whole.then(|| (uid.to_owned(), pod))
}

#[cfg(test)]
mod tests {
    use super::{PodLogs, parse};
    use perfusion_host::pods::Pods;

    const UID: &str = "11111111-2222-3333-4444-555555555555";

    #[test]
    fn a_directory_of_logs_names_its_pod() {
        let (uid, pod) = parse(&format!("shop_web-7d9_{UID}")).unwrap();
        assert_eq!(
            (uid.as_str(), pod.namespace.as_str(), pod.name.as_str()),
            (UID, "shop", "web-7d9")
        );
        for other in ["shop_web", "a_b_c_d", "__x", "lost+found"] {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    #[test]
    fn pods_come_and_go_with_their_directories() {
        let (folder, pods) = (tempfile::tempdir().unwrap(), Pods::default());
        let directory = folder.path().join(format!("shop_web-7d9_{UID}"));
        std::fs::create_dir(&directory).unwrap();
        let mut logs = PodLogs::of(folder.path().to_owned());
        logs.read(&pods, true);
        assert_eq!((pods.count(), pods.get(UID).unwrap().name.as_str()), (1, "web-7d9"));
        std::fs::remove_dir(&directory).unwrap();
        logs.read(&pods, true);
        assert_eq!((pods.count(), pods.get(UID).is_some()), (0, true), "gone, and remembered");
    }
}
