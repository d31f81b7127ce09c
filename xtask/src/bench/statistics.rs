//! The kernel's run-time statistics of BPF programs, switched on for as long as this value lives.

use std::fs;

use anyhow::{Context, Result};

const SWITCH: &str = "/proc/sys/kernel/bpf_stats_enabled";

/// Puts the old setting back when dropped.
pub(super) struct Enabled {
    before: String,
}

impl Enabled {
    pub(super) fn enable() -> Result<Enabled> {
        let before =
            fs::read_to_string(SWITCH).with_context(|| format!("{SWITCH}: cannot be read"))?;
        fs::write(SWITCH, "1").with_context(|| format!("{SWITCH}: cannot be written"))?;
        Ok(Enabled { before })
    }
}

impl Drop for Enabled {
    fn drop(&mut self) {
        // Left on it costs some nanoseconds a run and hurts nobody.
        fs::write(SWITCH, &self.before).ok();
    }
}
