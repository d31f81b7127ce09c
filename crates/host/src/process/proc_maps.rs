//! The executable mappings of a process, read from /proc.

use super::ProcessError;
use super::guarded_io::{IoPeer, wait_for};
use super::mapping::{Mapping, parse_maps_line};
use super::memory::MAX_MAPS_BYTES;
use std::io::{ErrorKind, Read as _};

/// Executable mappings of a process; a line that does not parse is left out.
pub(super) fn read_maps(pid: u32) -> Result<Vec<Mapping>, ProcessError> {
    let text = maps_text(pid)?;
    let lines = text.split(|&b| b == b'\n').map(String::from_utf8_lossy);
    Ok(lines
        .filter_map(|line| parse_maps_line(pid, &line))
        .filter_map(|m| Mapping::new(&m))
        .collect())
}

/// `/proc/PID/maps`, as far as it is read.
pub(super) fn maps_text(pid: u32) -> Result<Vec<u8>, ProcessError> {
    let path = format!("{}/maps", super::in_common(pid));
    let file = path.clone();
    let text = wait_for(IoPeer::Process(pid), move || {
        let mut text = Vec::new();
        std::fs::File::open(&file)?.take(MAX_MAPS_BYTES).read_to_end(&mut text).map(|_| text)
    });
    let text = text.unwrap_or_else(|| Err(ErrorKind::TimedOut.into()));
    text.map_err(|source| ProcessError::Read { pid, path, source })
}
