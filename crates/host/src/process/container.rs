//! The container and pod of a process, from the names of its cgroups. Container runtimes put 64
//! hexadecimal digits into the name; the kubelet puts the pod's uid there.

use std::fs::File;
use std::io::Read as _;
use std::sync::Arc;

/// A path in a cgroup hierarchy has no limit but that of names; nobody nests them this deep.
const CGROUP_BYTES: u64 = 1 << 16;

/// Where a process runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerIdentity {
    /// Id of its container.
    pub container: Option<Arc<str>>,
    /// Uid of its pod, as the pod's cgroup has it.
    pub pod: Option<Arc<str>>,
}

/// Where the process that has `pid` now runs.
#[must_use]
pub fn home(pid: u32) -> ContainerIdentity {
    let mut text = String::new();
    let file = File::open(format!("/proc/{pid}/cgroup"));
    if file.and_then(|file| file.take(CGROUP_BYTES).read_to_string(&mut text)).is_err() {
        return ContainerIdentity::default();
    }
    ContainerIdentity {
        container: container_id(&text).map(Into::into),
        pod: pod_id(&text).map(Into::into),
    }
}

/// A pod's uid in the text of `/proc/PID/cgroup`.
#[must_use]
pub(crate) fn pod_id(cgroup: &str) -> Option<String> {
    cgroup.lines().find_map(|line| pod_in(line.splitn(3, ':').nth(2)?))
}

/// A container's id in the text of `/proc/PID/cgroup`; the innermost one where containers are
/// nested.
#[must_use]
pub fn container_id(cgroup: &str) -> Option<&str> {
    cgroup.lines().find_map(|line| container_in(line.splitn(3, ':').nth(2)?))
}

/// A container's id in the path of a cgroup.
#[must_use]
pub fn container_in(path: &str) -> Option<&str> {
    path.rsplit('/')
        .find_map(|part| part.split(|c: char| !c.is_ascii_hexdigit()).find(|word| word.len() == 64))
}

/// The uid of the pod a cgroup belongs to: `…/kubepods-burstable-podUID.slice/…` with underscores
/// where systemd makes the names, `/kubepods/burstable/podUID/…` where the kubelet does.
#[must_use]
pub fn pod_in(cgroup: &str) -> Option<String> {
    cgroup.split('/').rev().find_map(|part| {
        let part = part.strip_suffix(".slice").unwrap_or(part);
        let uid = match part.strip_prefix("kubepods") {
            Some(rest) => rest.rsplit_once("-pod")?.1,
            None => part.strip_prefix("pod")?,
        };
        let uid = uid.replace('_', "-");
        // 36 with dashes; 32 for pods the kubelet reads from files.
        let is_uid =
            matches!(uid.len(), 32 | 36) && uid.bytes().all(|c| c.is_ascii_hexdigit() || c == b'-');
        is_uid.then_some(uid)
    })
}

#[cfg(test)]
mod tests {
    use super::{ContainerIdentity, container_id, home, pod_id, pod_in};

    const UID: &str = "11111111-2222-3333-4444-555555555555";

    #[test]
    fn both_ways_to_name_a_pods_cgroup_are_known() {
        let systemd = UID.replace('-', "_");
        for path in [
            format!(
                "/kubepods.slice/kubepods-burstable.slice/\
                 kubepods-burstable-pod{systemd}.slice/cri-x.scope"
            ),
            format!("/kubepods.slice/kubepods-pod{systemd}.slice"),
            format!("/kubepods/besteffort/pod{UID}/0123"),
            format!("/kubelet.slice/kubelet-kubepods.slice/kubepods/pod{UID}"),
            // As it is seen from another container.
            format!("/../../kubepods-burstable-pod{systemd}.slice/cri-x.scope"),
        ] {
            assert_eq!(pod_in(&path).as_deref(), Some(UID), "{path}");
            assert_eq!(pod_id(&format!("1:name=systemd:/\n0::{path}\n")).as_deref(), Some(UID));
        }
        for path in ["/system.slice/podman.service", "/kubepods/podcast", "/"] {
            assert_eq!(pod_in(path), None, "{path}");
        }
    }

    #[test]
    fn container_ids_are_found_in_the_cgroup_names_of_all_runtimes() {
        let id = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
        for path in [
            format!("0::/docker/{id}"),
            format!(
                "0::/kubepods.slice/kubepods-burstable.slice/\
                 kubepods-pod1_2.slice/cri-containerd-{id}.scope"
            ),
            format!("1:name=systemd:/x\n0::/machine.slice/libpod-{id}.scope/container"),
        ] {
            assert_eq!(container_id(&path), Some(id), "{path}");
        }
        assert_eq!(container_id("0::/user.slice/user-0.slice/session-1.scope"), None);
    }

    #[test]
    fn a_process_that_is_gone_or_in_none_has_no_container() {
        assert_eq!(home(u32::MAX), ContainerIdentity::default());
    }
}
