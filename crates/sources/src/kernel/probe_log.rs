//! The probes' own log: what aya-log writes in the kernel becomes lines of `tracing`.

use crate::kernel::KernelError;
use aya::Ebpf;
use aya_log::{EbpfLogger, Level};
use log::{Log, Metadata, Record};

/// The lines' target, for `PERFUSION_LOG=probes=debug`.
const TARGET: &str = "probes";

/// The ring of lines while they are shown: each is told once, so it does not fill.
const SHOWN_BYTES: u32 = 64 << 10;

/// Whether somebody is to see the lines. It is decided when the probes are loaded.
pub(super) fn is_shown() -> bool {
    tracing::enabled!(target: TARGET, tracing::Level::DEBUG)
}

/// The level for the probes' read-only data: where it is 0 the verifier removes all that writes.
pub(super) fn level(shown: bool) -> u8 {
    if shown { Level::Debug.into() } else { 0 }
}

/// Bytes of the ring of lines: a page, the least a ring can be, where nobody sees them.
pub(super) fn ring_bytes(shown: bool) -> u32 {
    let page = u32::try_from(rustix::param::page_size()).unwrap_or(SHOWN_BYTES);
    if shown { page.max(SHOWN_BYTES) } else { page }
}

/// Reads the lines.
pub(super) struct ProbeLog(EbpfLogger<TracingLines>);

impl ProbeLog {
    /// `None` when nobody is to see them.
    pub(super) fn open(bpf: &mut Ebpf) -> Result<Option<Self>, KernelError> {
        if !is_shown() {
            return Ok(None);
        }
        let logger = EbpfLogger::init_with_logger(bpf, TracingLines);
        logger
            .map(|logger| Some(Self(logger)))
            .map_err(|_| KernelError::Object { name: "AYA_LOGS" })
    }

    /// Shows what has come in.
    pub(super) fn show(&mut self) {
        self.0.flush();
    }
}

/// The probes' lines are `log`'s records, and the program's are `tracing`'s.
struct TracingLines;

impl Log for TracingLines {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        tracing::debug!(target: TARGET, "probes: {}", record.args());
    }

    fn flush(&self) {}
}
