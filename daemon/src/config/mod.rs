//! The daemon's configuration: types, defaults and what must hold between them. `load` reads it.
//!
//! A sink of its own kind adds a field here, and its options live with it.

pub mod load;

use crate::kubernetes::KubernetesConfig;
use crate::select::SelectionConfig;
use crate::symbols::{self, FetchLimits, SymbolServers};
use perfusion_export::directory::Files;
use perfusion_export::otlp::OtlpOptions;
use perfusion_export::pyroscope::{self, PyroscopeOptions};
use perfusion_export::quantity::{ByteSize, HumanDuration, Percentage};
use perfusion_export::receiver::SpoolOptions;
#[cfg(feature = "object-storage")]
use perfusion_export::s3::S3Options;
use perfusion_sources::SourceRates;
use perfusion_sources::kernel;
use perfusion_sources::shim::ShimLimits;
use perfusion_sources::shim::Subscriptions;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// All of it. What is absent has its default. The daemon reads it again on SIGHUP; what takes
/// effect at its next start only says so.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// What is recorded.
    pub recording: RecordingConfig,
    /// Who is recorded and attached to.
    pub selection: SelectionConfig,
    /// The time one profile covers.
    pub windows: WindowsConfig,
    /// How processes are told apart.
    pub services: ServicesConfig,
    /// The pods of this node, where it is one of a Kubernetes cluster.
    pub kubernetes: KubernetesConfig,
    /// Profiles as files.
    pub files: Files,
    /// Receivers of OpenTelemetry's profiles: collectors, and back ends that speak their protocol.
    /// Any number.
    pub otlp: Vec<OtlpOptions>,
    /// Pyroscope servers. Any number.
    pub pyroscope: Vec<PyroscopeOptions>,
    /// Buckets of S3 and of what speaks its protocol. Any number.
    #[cfg(feature = "object-storage")]
    pub s3: Vec<S3Options>,
    /// Where what is to be sent waits.
    pub spool: SpoolOptions,
    /// Loading the shim into .NET processes.
    pub attach: AttachConfig,
    /// Symbols of native files.
    pub symbols: SymbolsConfig,
    /// What the daemon may take of its host, and what ends its work.
    pub limits: LimitsConfig,
    /// Metrics and health over HTTP.
    pub telemetry: TelemetryConfig,
    /// The daemon's own log.
    pub log: LogConfig,
}

/// What is recorded. A change begins a new recording, which takes a second.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RecordingConfig {
    /// Only the threads of this cgroup v2 directory (not of its children); absent: the whole host.
    pub cgroup: Option<PathBuf>,
    /// CPU samples per second and CPU, 1 to 10000.
    #[schemars(range(min = 1, max = 10_000))]
    pub frequency: u32,
    /// Most bytes of user stack copied per sample and wait, 4KiB to 128KiB (before Linux 5.17 at
    /// most 64KiB, of a wait 32KiB); only what a thread uses is copied.
    pub stack_copy: ByteSize,
    /// Budget a second for the stacks of waits, a sixth of it for threads that wait more than 32
    /// times a second; above it waits keep their exact timing and their stacks are sampled.
    pub wait_stacks: ByteSize,
    /// Whether whoever ends a wait has a stack too, beyond the waiting stack and a frame
    /// `[woken by]`; out of the same budget.
    pub waker_stacks: bool,
    /// Whether CPU time and waits are told apart by what their threads worked for, where those
    /// publish it (OpenTelemetry's thread context), in the labels `trace_id` and `span_id`;
    /// profiles grow.
    pub spans: bool,
    /// Sampled objects watched at a time in each .NET process, 256 to 65536.
    pub live_objects: u32,
    /// Samples of allocations, and large objects, in a second of which each .NET process tells of
    /// all, 16 to 1000000 of either; of more, chance chooses about as many.
    pub allocation_samples: u32,
    /// Whether runtimes are asked for exceptions; without, a program that throws many thousand a
    /// second pays nothing for it.
    pub exceptions: bool,
    /// Whether what exceptions say is recorded, too (label `exception_message`); messages may hold
    /// anything, users' data among it.
    pub exception_messages: bool,
    /// Whether runtimes are asked for waits for locks (`contentions`, `delay`).
    pub contention: bool,
    /// Whether runtimes are asked how many workers their thread pools have, why that changes, and
    /// how much work waits.
    pub thread_pool: bool,
    /// Whether source lines are found, for assemblies that have their PDB (in themselves or beside
    /// them) and native files with debug information, where inlined functions are frames, too;
    /// profiles grow.
    pub lines: bool,
    /// Memory between the probes and the daemon, a power of two from 1MiB to 1GiB.
    pub ring: ByteSize,
}

impl RecordingConfig {
    /// What shims are asked for at most.
    #[must_use]
    pub fn limits(&self) -> ShimLimits {
        ShimLimits { live_objects: self.live_objects, allocation_samples: self.allocation_samples }
    }

    /// The rates to begin with.
    #[must_use]
    pub fn rates(&self) -> SourceRates {
        let kernel = kernel::KernelRates {
            frequency_hz: self.frequency,
            wait_stack_budget_bytes_per_s: self.wait_stacks.0,
        };
        SourceRates { kernel, allocation_samples: self.allocation_samples }
    }

    /// What runtimes are asked for.
    #[must_use]
    pub fn subscriptions(&self) -> Subscriptions {
        Subscriptions {
            exceptions: self.exceptions,
            exception_messages: self.exception_messages,
            contention: self.contention,
            thread_pool: self.thread_pool,
            il_maps: self.lines,
            ..Subscriptions::default()
        }
    }
}

impl Default for RecordingConfig {
    fn default() -> Self {
        Self {
            cgroup: None,
            frequency: 99,
            stack_copy: ByteSize(128 << 10),
            wait_stacks: ByteSize(6 << 20),
            waker_stacks: false,
            spans: false,
            live_objects: perfusion_sources::shim::LIVE_OBJECTS,
            allocation_samples: perfusion_sources::shim::ALLOCATION_SAMPLES,
            exceptions: true,
            exception_messages: false,
            contention: true,
            thread_pool: false,
            lines: false,
            ring: ByteSize(8 << 20),
        }
    }
}

/// The time one profile covers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct WindowsConfig {
    /// From one second to a day.
    pub length: HumanDuration,
    /// Whether windows begin at whole multiples of their length by the wall clock (every full
    /// minute, for one minute).
    pub aligned: bool,
}

impl Default for WindowsConfig {
    fn default() -> Self {
        Self { length: HumanDuration(Duration::from_secs(60)), aligned: true }
    }
}

/// How processes are told apart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ServicesConfig {
    /// Most services with a profile of their own in a window: those that used most CPU time. The
    /// rest share the service `[other]`.
    pub max: usize,
    /// Labels of every profile, by the names of OpenTelemetry's resource attributes. `host.name` is
    /// there without being named.
    pub labels: BTreeMap<String, String>,
}

impl Default for ServicesConfig {
    fn default() -> Self {
        Self { max: 100, labels: BTreeMap::new() }
    }
}

/// Into which .NET processes the shim is loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AttachPolicy {
    /// None: names of managed methods are read from memory, and there are no allocations.
    #[default]
    Off,
    /// Those of the listed services.
    Listed,
    /// All but the services that are excepted.
    All,
}

impl AttachPolicy {
    /// As the configuration has it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Listed => "listed",
            Self::All => "all",
        }
    }
}

/// Loading the shim into .NET processes. A process opts out of it with `PERFUSION_ATTACH=off` in
/// its environment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct AttachConfig {
    /// Into which.
    pub policy: AttachPolicy,
    /// Names of services, for the policy `listed`.
    pub services: Vec<String>,
    /// Names of services whose processes are never touched.
    pub except: Vec<String>,
    /// How long to wait after a first failure with a process; it doubles with each, up to an hour.
    pub retry_after: HumanDuration,
}

impl Default for AttachConfig {
    fn default() -> Self {
        Self {
            policy: AttachPolicy::Off,
            services: Vec::new(),
            except: Vec::new(),
            retry_after: HumanDuration(Duration::from_secs(30)),
        }
    }
}

/// Symbols of native files that have none. They are looked for in separate debug files on this host
/// anyway. A window does not wait for those that a server sends: later ones have the names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SymbolsConfig {
    /// Servers that are asked by build id: debuginfod's, or symbol stores of Microsoft's layout,
    /// which have those of .NET runtimes. None: nobody is asked.
    pub urls: Vec<String>,
    /// Directories with debug files by build id (`.build-id/ab/cdef.debug`), such as `perfusion
    /// symbols fetch` fills. Debug files are looked for there, too.
    pub directories: Vec<PathBuf>,
    /// Where that is kept which servers send. Nobody but the daemon's user may write there.
    pub cache: PathBuf,
    /// Most bytes that are kept there; the oldest files go first.
    pub cache_size: ByteSize,
    /// Longest file that is taken from a server.
    pub max_file: ByteSize,
    /// How long a file may take, 1s to 1h.
    pub timeout: HumanDuration,
}

impl SymbolsConfig {
    /// Where debug files are looked for besides the usual places.
    #[must_use]
    pub fn places(&self) -> Vec<PathBuf> {
        let cache = (!self.urls.is_empty()).then_some(&self.cache);
        self.directories.iter().chain(cache).cloned().collect()
    }

    /// Bounds of what is fetched.
    #[must_use]
    pub fn limits(&self) -> FetchLimits {
        FetchLimits { file_bytes: self.max_file.0, timeout: self.timeout.0 }
    }
}

impl Default for SymbolsConfig {
    fn default() -> Self {
        Self {
            urls: Vec::new(),
            directories: Vec::new(),
            cache: PathBuf::from(symbols::CACHE),
            cache_size: ByteSize(2 << 30),
            max_file: ByteSize(512 << 20),
            timeout: HumanDuration(Duration::from_secs(60)),
        }
    }
}

/// What the daemon may take of its host, and what ends its work.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LimitsConfig {
    /// CPU time of daemon and probes, of that of all CPUs, 0.1% to 100%. A window that took more is
    /// followed by one at lower rates. The probes' counts where it is known: with CAP_SYS_ADMIN or
    /// kernel.bpf_stats_enabled=1 (`perfusion doctor` tells).
    pub cpu: Percentage,
    /// Memory of the daemon, its maps and rings, 64MiB to 1TiB: with more, caches are dropped, and
    /// then windows end early.
    pub memory: ByteSize,
    /// While there is a file with this name, nothing is recorded and nothing is attached. Its
    /// directory also holds the control socket and the file that only one daemon can lock, which
    /// move when the daemon starts again.
    pub kill_switch: PathBuf,
    /// The kill switch as a value: nothing is recorded and nothing is attached while this is true,
    /// from the moment on when the configuration is read again.
    pub switched_off: bool,
    /// Whether the daemon makes way for others on its host: an `oom_score_adj` of 500, I/O class
    /// best effort with the last priority, and nice 10 for all threads but those that record. Only
    /// ever lowers itself, once, when it starts; so a change takes effect when it starts again.
    pub lower_priority: bool,
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self {
            cpu: Percentage(0.05),
            memory: ByteSize(256 << 20),
            kill_switch: PathBuf::from("/run/perfusion/off"),
            switched_off: false,
            lower_priority: true,
        }
    }
}

/// Metrics and health over HTTP.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TelemetryConfig {
    /// Address and port; absent: nobody is listened to.
    #[schemars(with = "Option<String>")]
    pub listen: Option<SocketAddr>,
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        Self { listen: Some(SocketAddr::from(([127, 0, 0, 1], 7071))) }
    }
}

/// Form of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// A line for people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// How much is logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// What failed.
    Error,
    /// What may matter.
    Warn,
    /// What happens.
    #[default]
    Info,
    /// Everything.
    Debug,
}

/// The daemon's own log, on stderr. A change takes effect when the daemon starts again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LogConfig {
    /// Its form.
    pub format: LogFormat,
    /// How much of it. Where the command line does not say it (`--set log.level=…`), PERFUSION_LOG
    /// of the environment goes before it: a level, or filters such as
    /// `warn,perfusion_dotnet::attach=debug`.
    pub level: LogLevel,
}

/// Something does not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidValue {
    /// Dotted name of the value.
    pub key: &'static str,
    /// What was expected and found.
    pub problem: String,
}

impl Config {
    /// True when there is anybody whose profiles wait in the spool.
    fn has_receivers(&self) -> bool {
        #[cfg(feature = "object-storage")]
        if !self.s3.is_empty() {
            return true;
        }
        !(self.otlp.is_empty() && self.pyroscope.is_empty())
    }

    /// What can be used and is hardly meant, one line each.
    pub fn remarks(&self) -> impl Iterator<Item = String> {
        let AttachConfig { policy, services, except, .. } = &self.attach;
        let lists = |list: &[String], wanted: bool| !list.is_empty() && !wanted;
        let same = self.files.directory.is_some() && self.files.directory == self.spool.directory;
        let odd = [
            (
                lists(services, *policy == AttachPolicy::Listed),
                "attach.services is for attach.policy listed only",
            ),
            (
                lists(except, *policy != AttachPolicy::Off),
                "attach.except says nothing while attach.policy is off",
            ),
            (
                services.iter().chain(except).any(String::is_empty),
                "attach.services, attach.except: no service has an empty name",
            ),
            (
                same,
                "files.directory and spool.directory are the same: spools lie among the services' \
                 directories",
            ),
            (
                self.has_no_sink(),
                "no sink is configured: profiles are made and dropped (set files.directory)",
            ),
        ];
        let odd = odd.into_iter().filter(|(is_so, _)| *is_so).map(|(_, what)| what.to_owned());
        self.selection.remarks().into_iter().chain(odd)
    }

    /// How many profiles are sent to.
    #[must_use]
    pub fn receivers(&self) -> usize {
        let count = self.otlp.len() + self.pyroscope.len();
        #[cfg(feature = "object-storage")]
        let count = count + self.s3.len();
        count
    }

    fn has_no_sink(&self) -> bool {
        self.files.directory.is_none() && self.receivers() == 0
    }

    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// The first value that does not fit.
    pub fn check(&self) -> Result<(), InvalidValue> {
        let unfit = |key, expected: &str, found: String| {
            Err(InvalidValue { key, problem: format!("expected {expected}, found {found}") })
        };
        let RecordingConfig {
            frequency,
            stack_copy,
            wait_stacks,
            live_objects,
            allocation_samples,
            ring,
            ..
        } = &self.recording;
        if !(1..=10_000).contains(frequency) {
            return unfit("recording.frequency", "1 to 10000", frequency.to_string());
        }
        if !(4 << 10..=128 << 10).contains(&stack_copy.0) {
            return unfit("recording.stack_copy", "4KiB to 128KiB", stack_copy.to_string());
        }
        if !(1 << 20..=1 << 30).contains(&wait_stacks.0) {
            return unfit("recording.wait_stacks", "1MiB to 1GiB", wait_stacks.to_string());
        }
        if !(256..=65_536).contains(live_objects) {
            return unfit("recording.live_objects", "256 to 65536", live_objects.to_string());
        }
        if !(16..=1_000_000).contains(allocation_samples) {
            return unfit(
                "recording.allocation_samples",
                "16 to 1000000",
                allocation_samples.to_string(),
            );
        }
        if !(1 << 20..=1 << 30).contains(&ring.0) || !ring.0.is_power_of_two() {
            return unfit("recording.ring", "a power of two from 1MiB to 1GiB", ring.to_string());
        }
        if !(Duration::from_secs(1)..=Duration::from_secs(86_400)).contains(&self.windows.length.0)
        {
            return unfit("windows.length", "1s to 1d", self.windows.length.to_string());
        }
        if !(1..=10_000).contains(&self.services.max) {
            return unfit("services.max", "1 to 10000", self.services.max.to_string());
        }
        if self.files.max_count == 0 {
            return unfit("files.max_count", "1 or more", "0: nothing would be kept".to_owned());
        }
        if self.files.max_size.0 == 0 {
            return unfit("files.max_size", "more than 0", "0: nothing would be kept".to_owned());
        }
        let LimitsConfig { cpu, memory, .. } = &self.limits;
        if !(0.001..=1.0).contains(&cpu.0) {
            return unfit("limits.cpu", "0.1% to 100%", cpu.to_string());
        }
        if !(64 << 20..=1 << 40).contains(&memory.0) {
            return unfit("limits.memory", "64MiB to 1TiB", memory.to_string());
        }
        let paths = [
            ("files.directory", self.files.directory.as_ref()),
            ("limits.kill_switch", Some(&self.limits.kill_switch)),
            ("kubernetes.ca_file", Some(&self.kubernetes.ca_file)),
            ("kubernetes.pod_logs", Some(&self.kubernetes.pod_logs)),
            ("kubernetes.token_file", Some(&self.kubernetes.token_file)),
            ("recording.cgroup", self.recording.cgroup.as_ref()),
            ("spool.directory", self.spool.directory.as_ref()),
            ("symbols.cache", Some(&self.symbols.cache)),
        ];
        let directories = self.symbols.directories.iter();
        let directories = directories.map(|path| ("symbols.directories", Some(path)));
        for (key, path) in paths.into_iter().chain(directories) {
            if let Some(path) = path.filter(|path| !path.is_absolute()) {
                return unfit(key, "an absolute path", path.display().to_string());
            }
        }
        let hour = Duration::from_secs(3600);
        if !(Duration::from_secs(1)..=hour).contains(&self.symbols.timeout.0) {
            return unfit("symbols.timeout", "1s to 1h", self.symbols.timeout.to_string());
        }
        for url in &self.symbols.urls {
            if let Err(error) = SymbolServers::check(url) {
                return Err(InvalidValue { key: "symbols.urls", problem: error.to_string() });
            }
        }
        if self.has_receivers() && self.spool.directory.is_none() {
            return unfit(
                "spool.directory",
                "a directory, since there is a receiver",
                "none".to_owned(),
            );
        }
        for (at, receiver) in self.otlp.iter().enumerate() {
            if let Err(problem) = receiver.check() {
                return Err(InvalidValue { key: "otlp", problem });
            }
            // Two with one spool would take each other's.
            if self.otlp.iter().take(at).any(|other| other.place() == receiver.place()) {
                return unfit("otlp", "each receiver once", receiver.url.clone());
            }
        }
        if !self.pyroscope.is_empty() && self.windows.length.0 >= pyroscope::MOST_AGE {
            return unfit(
                "windows.length",
                &format!(
                    "less than {}, since pyroscope takes nothing that began an hour ago",
                    HumanDuration(pyroscope::MOST_AGE)
                ),
                self.windows.length.to_string(),
            );
        }
        for (at, server) in self.pyroscope.iter().enumerate() {
            if let Err(problem) = server.check() {
                return Err(InvalidValue { key: "pyroscope", problem });
            }
            if self.pyroscope.iter().take(at).any(|other| other.place() == server.place()) {
                return unfit("pyroscope", "each server once", server.url.clone());
            }
        }
        #[cfg(feature = "object-storage")]
        for (at, store) in self.s3.iter().enumerate() {
            if let Err(problem) = store.check() {
                return Err(InvalidValue { key: "s3", problem });
            }
            if self.s3.iter().take(at).any(|other| other.place() == store.place()) {
                return unfit("s3", "each prefix of a bucket once", store.place());
            }
        }
        if let Err(problem) = self.kubernetes.check() {
            return Err(InvalidValue { key: "kubernetes", problem });
        }
        if let Err(problem) = self.selection.check(self.kubernetes.pods) {
            return Err(InvalidValue { key: "selection", problem });
        }
        if self.recording.cgroup.is_some() && !self.selection.is_all() {
            return unfit("recording.cgroup", "none, since there is a selection", "one".to_owned());
        }
        if self.attach.policy == AttachPolicy::Listed && self.attach.services.is_empty() {
            return unfit(
                "attach.services",
                "at least one service, since attach.policy is listed",
                "none".to_owned(),
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Config, RecordingConfig};
    use perfusion_sources::shim::Subscriptions;

    #[test]
    fn what_contradicts_itself_is_told() {
        let said = |text: &str| {
            let config: Config = serde_yaml::from_str(text).unwrap();
            config.check().unwrap();
            config.remarks().collect::<Vec<_>>().join("; ")
        };
        let files = "files: {directory: /p}\n";
        assert_eq!(said(files), "");
        for (text, word) in [
            ("attach: {policy: off, services: [a]}", "for attach.policy listed only"),
            ("attach: {policy: all, services: [a]}", "for attach.policy listed only"),
            ("attach: {except: [a]}", "says nothing"),
            ("attach: {policy: listed, services: ['']}", "empty name"),
            ("spool: {directory: /p}", "are the same"),
        ] {
            let said = said(&format!("{files}{text}\n"));
            assert!(said.contains(word), "{text}: {said}");
        }
        assert!(said("{}").contains("no sink is configured"));
    }

    #[test]
    fn windows_are_shorter_than_what_pyroscope_takes() {
        let check = |length: &str, server: &str| {
            let text = format!("windows: {{length: {length}}}\nspool: {{directory: /s}}\n{server}");
            serde_yaml::from_str::<Config>(&text).unwrap().check()
        };
        let server = "pyroscope: [{url: \"http://a\"}]\n";
        assert!(check("57m", server).is_ok() && check("1h", "").is_ok());
        let error = check("58m", server).unwrap_err();
        assert_eq!(error.key, "windows.length");
        assert!(error.problem.contains("less than 58m"), "{}", error.problem);
    }

    #[test]
    fn two_receivers_are_one_whatever_their_last_slash_says() {
        for (kind, url) in [("otlp", "http://a:4317"), ("pyroscope", "http://a/x")] {
            let check = |other: &str| {
                let text = format!(
                    "spool: {{directory: /s}}\n{kind}: [{{url: \"{url}\"}}, \
                     {{url: \"{other}\"}}]\n"
                );
                serde_yaml::from_str::<Config>(&text).unwrap().check()
            };
            assert_eq!(check(&format!("{url}/")).unwrap_err().key, kind);
            assert!(check(&format!("{url}/y")).is_ok());
        }
    }

    #[test]
    fn runtimes_are_asked_for_all_that_is_not_switched_off() {
        assert_eq!(RecordingConfig::default().subscriptions(), Subscriptions::default());
        let subscriptions =
            RecordingConfig { exceptions: false, ..RecordingConfig::default() }.subscriptions();
        assert_eq!(subscriptions, Subscriptions { exceptions: false, ..Subscriptions::default() });
        assert_eq!(
            subscriptions.comments().collect::<Vec<_>>(),
            ["exceptions: not recorded, as asked"]
        );
        let subscriptions =
            RecordingConfig { contention: false, ..RecordingConfig::default() }.subscriptions();
        assert_eq!(
            subscriptions.comments().collect::<Vec<_>>(),
            ["contentions, delay: not recorded, as asked"]
        );
    }
}
