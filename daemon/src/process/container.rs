//! Which container a process runs in: the 64 hexadecimal digits that every runtime puts into the name of a container's cgroup.

use std::fs::File;
use std::io::Read as _;
use std::sync::Arc;

/// A path in a cgroup hierarchy has no limit but that of names; nobody nests them this deep.
const CGROUP_BYTES: u64 = 1 << 16;

/// The container of the process that has `pid` now, if it is in one.
#[must_use]
pub fn container(pid: u32) -> Option<Arc<str>> {
    let mut text = String::new();
    let file = File::open(format!("/proc/{pid}/cgroup")).ok()?;
    file.take(CGROUP_BYTES).read_to_string(&mut text).ok()?;
    container_id(&text).map(Into::into)
}

/// A container's id in the text of `/proc/PID/cgroup`; the innermost one where containers are nested.
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

#[cfg(test)]
mod tests {
    use super::container_id;

    #[test]
    fn container_ids_are_found_in_the_cgroup_names_of_all_runtimes() {
        let id = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
        for path in [
            format!("0::/docker/{id}"),
            format!(
                "0::/kubepods.slice/kubepods-burstable.slice/kubepods-pod1_2.slice/cri-containerd-{id}.scope"
            ),
            format!("1:name=systemd:/x\n0::/machine.slice/libpod-{id}.scope/container"),
        ] {
            assert_eq!(container_id(&path), Some(id), "{path}");
        }
        assert_eq!(container_id("0::/user.slice/user-0.slice/session-1.scope"), None);
    }

    #[test]
    fn a_process_that_is_gone_or_in_none_has_no_container() {
        assert_eq!(super::container(u32::MAX), None);
    }
}
