//! Why the kernel cannot be recorded.

use super::btf;
use aya::maps::MapError;
use perfusion_host::cpus::CpusError;
use perfusion_host::system_limits::explain;
use std::io;

/// Why the kernel cannot be recorded.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// Built without the probes.
    #[error("this program was built without its eBPF probes; build it with `cargo xtask build`")]
    NoProbes,
    /// An option outside its range.
    #[error("{option}: expected {expected}, found {found}")]
    Option {
        /// Its name.
        option: &'static str,
        /// Its range.
        expected: &'static str,
        /// What was given.
        found: u64,
    },
    /// A process to record is not there.
    #[error("no process with pid {pid}")]
    NoProcess {
        /// Its pid.
        pid: u32,
    },
    /// The threads of a process to record cannot be listed.
    #[error("/proc/{pid}/task: {source}")]
    ProcessUnreadable {
        /// Its pid.
        pid: u32,
        /// Why.
        source: io::Error,
    },
    /// The running kernel lacks something, or this process lacks a right.
    #[error(transparent)]
    Feature(#[from] crate::kernel::features::FeatureError),
    /// BTF cannot be read.
    #[error("{}: {}{}", btf::PATH, explain(source), btf_advice(source))]
    BtfUnreadable {
        /// Why.
        source: io::Error,
    },
    /// BTF lacks something.
    #[error(transparent)]
    KernelBtf(#[from] btf::BtfError),
    /// aya cannot read the kernel's BTF.
    #[error("{}: {source}", btf::PATH)]
    Btf {
        /// Why.
        source: aya::BtfError,
    },
    /// The thread that reads BTF died.
    #[error("{}: reading it panicked", btf::PATH)]
    BtfReader,
    /// A thread that loads a program died.
    #[error("loading the eBPF programs panicked")]
    LoaderDied,
    /// An unknown tracepoint prototype.
    #[error("tracepoint sched_switch: expected (bool, task, task[, state]), found {found:?}")]
    Prototype {
        /// The arguments' sorts.
        found: Vec<btf::Argument>,
    },
    /// The kernel refuses the maps or the object.
    #[error("loading the eBPF object: {source}")]
    Load {
        /// Why.
        source: aya::EbpfError,
    },
    /// The kernel refuses a map.
    #[error(
        "eBPF map {name}: {source}; before Linux 5.11 maps count as locked memory, of which \
         {limit} are allowed: allow more (ulimit -l \
         unlimited, LimitMEMLOCK=infinity), or grant CAP_SYS_RESOURCE; on a newer kernel a seccomp \
         profile or an LSM forbids it"
    )]
    MapForbidden {
        /// The map.
        name: String,
        /// Why.
        source: io::Error,
        /// RLIMIT_MEMLOCK.
        limit: String,
    },
    /// The kernel refuses a program.
    #[error("eBPF program {name}: {source}")]
    Program {
        /// Its name.
        name: &'static str,
        /// Why.
        source: aya::programs::ProgramError,
    },
    /// The object lacks a program or map, or it is of another kind.
    #[error(
        "the eBPF object has no `{name}` of the expected kind: it belongs to another version of \
         this program"
    )]
    Object {
        /// Its name.
        name: &'static str,
    },
    /// A sampling timer cannot be made.
    #[error(
        "sampling timer of CPU {cpu}: {}{}",
        explain(source),
        perfusion_host::system_limits::sampler_advice(*frequency_hz, source)
    )]
    Sampler {
        /// The CPU.
        cpu: u32,
        /// How often it was to ring, per second.
        frequency_hz: u32,
        /// Why.
        source: aya::programs::ProgramError,
    },
    /// perf's records cannot be had.
    #[error(
        "perf_event_open on CPU {cpu}: {source}{}",
        perfusion_host::system_limits::sampler_advice(0, source)
    )]
    Perf {
        /// The CPU.
        cpu: u32,
        /// Why.
        source: io::Error,
    },
    /// perf's ring cannot be mapped.
    #[error(
        "mmap of perf's ring of CPU {cpu}: {source}; kernel.perf_event_mlock_kb is {}, \
         RLIMIT_MEMLOCK is {} bytes: raise one of them, or \
         grant CAP_IPC_LOCK",
        perfusion_host::system_limits::sysctl("kernel.perf_event_mlock_kb"),
        perfusion_host::system_limits::limit(rustix::process::Resource::Memlock)
    )]
    PerfRing {
        /// The CPU.
        cpu: u32,
        /// Why.
        source: io::Error,
    },
    /// Too few open files are allowed.
    #[error(
        "RLIMIT_NOFILE: expected at least {needed} open files on this host, found {found}: allow \
         more (ulimit -n, LimitNOFILE=), or grant \
         CAP_SYS_RESOURCE"
    )]
    FewOpenFiles {
        /// How many are needed.
        needed: u64,
        /// How many are allowed.
        found: u64,
    },
    /// The thread that scans sleeping ones cannot be started.
    #[error("the thread that scans sleeping ones: {source}")]
    Visitor {
        /// Why.
        source: io::Error,
    },
    /// The probes' rules cannot be mapped.
    #[error("eBPF maps of unwind rules: {source}")]
    RulesUnmapped {
        /// Why.
        source: io::Error,
    },
    /// The CPUs cannot be listed.
    #[error(transparent)]
    Cpus(#[from] CpusError),
    /// A map refuses an access.
    #[error("eBPF map {name}: {source}")]
    Map {
        /// Its name.
        name: &'static str,
        /// Why.
        source: MapError,
    },
}

/// What to do about BTF that cannot be read: it is there only on a kernel that was built with it.
fn btf_advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "; the kernel must be built with CONFIG_DEBUG_INFO_BTF",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::KernelError;
    use rustix::io::Errno;

    #[test]
    fn only_a_kernel_without_btf_is_told_to_be_built_with_it() {
        let told = |errno: Errno| KernelError::BtfUnreadable { source: errno.into() }.to_string();
        let missing = told(Errno::NOENT);
        assert!(missing.ends_with("[ENOENT]; the kernel must be built with CONFIG_DEBUG_INFO_BTF"));
        let memory = told(Errno::NOMEM);
        assert!(memory.starts_with("/sys/kernel/btf/vmlinux: ") && memory.contains("[ENOMEM]"));
        assert!(memory.contains("RLIMIT_AS is ") && !memory.contains("CONFIG_DEBUG"), "{memory}");
    }
}
