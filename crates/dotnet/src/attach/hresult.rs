//! HRESULTs of the runtime that a user may meet, by the names of coreclr's `corerror.h`, with what
//! to do about them.

use std::fmt;

/// A failure code of the runtime.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Hresult(pub u32);

/// (code, name, what it means for the user).
const KNOWN: &[(u32, &str, &str)] = &[
    (0x8013_135b, "CORDIAG_E_NOT_YET_AVAILABLE", "the runtime is still starting; try again"),
    (
        0x8013_1367,
        "CORPROF_E_PROFILER_DETACHING",
        "another profiler is just leaving; try again in a few seconds",
    ),
    (
        0x8013_1368,
        "CORPROF_E_PROFILER_NOT_ATTACHABLE",
        "this runtime does not let profilers attach",
    ),
    (0x8013_136a, "CORPROF_E_PROFILER_ALREADY_ACTIVE", "too many profilers are attached already"),
    (
        0x8013_1370,
        "CORPROF_E_IRREVERSIBLE_INSTRUMENTATION_PRESENT",
        "an earlier profiler rewrote code; restart the program",
    ),
    (0x8013_1371, "CORPROF_E_RUNTIME_UNINITIALIZED", "the runtime is still starting; try again"),
    (
        0x8013_1375,
        "CORPROF_E_PROFILER_CANCEL_ACTIVATION",
        "the shim declined; its runtime is older than .NET 6",
    ),
    (
        0x8013_1376,
        "CORPROF_E_CONCURRENT_GC_NOT_PROFILABLE",
        "this runtime cannot be profiled with concurrent GC",
    ),
    (
        0x8013_1379,
        "CORPROF_E_TIMEOUT_WAITING_FOR_CONCURRENT_GC",
        "a background GC lasted too long; try again",
    ),
    (
        0x8013_1384,
        "CORDIAGIPC_E_BAD_ENCODING",
        "the runtime does not understand the request; it is older than .NET 6",
    ),
    (
        0x8013_1385,
        "CORDIAGIPC_E_UNKNOWN_COMMAND",
        "the runtime does not know the request; it is older than .NET 6 or NativeAOT",
    ),
    (0x8013_1386, "CORDIAGIPC_E_UNKNOWN_MAGIC", "the runtime does not understand the request"),
    (0x8013_1388, "CORPROF_E_SUSPENSION_IN_PROGRESS", "the runtime is being suspended; try again"),
    (
        0x8013_1515,
        "COR_E_NOTSUPPORTED",
        "profiling is switched off (DOTNET_EnableDiagnostics_Profiler=0) or this is NativeAOT",
    ),
    (0x8007_0005, "E_ACCESSDENIED", "the process may not read the library"),
    (0x8007_000e, "E_OUTOFMEMORY", "the process has no memory left for the shim"),
    (0x8007_0057, "E_INVALIDARG", "the runtime refused the request's arguments"),
    (
        0x8007_007e,
        "ERROR_MOD_NOT_FOUND",
        "the process could not load the library: look for noexec mounts or a security module",
    ),
    (0x8000_4005, "E_FAIL", "the runtime gives no reason"),
];

impl Hresult {
    /// Name in `corerror.h`, if it is one of those a user can meet.
    #[must_use]
    pub fn name(self) -> Option<&'static str> {
        KNOWN.iter().find(|(code, ..)| *code == self.0).map(|(_, name, _)| *name)
    }

    /// What it means and what to do.
    #[must_use]
    pub fn advice(self) -> &'static str {
        KNOWN
            .iter()
            .find(|(code, ..)| *code == self.0)
            .map_or("not a code a user should meet", |(.., advice)| advice)
    }

    /// True when the same request can succeed a little later.
    #[must_use]
    pub(crate) fn is_transient(self) -> bool {
        matches!(self.0, 0x8013_135b | 0x8013_1367 | 0x8013_1371 | 0x8013_1388)
    }
}

impl fmt::Display for Hresult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} (0x{:08x}): {}", self.0, self.advice()),
            None => write!(f, "0x{:08x}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Hresult, KNOWN};

    #[test]
    fn known_codes_are_failures_and_listed_once() {
        for (index, (code, name, advice)) in KNOWN.iter().enumerate() {
            assert!(code & 0x8000_0000 != 0 && !advice.is_empty(), "{name}");
            assert!(KNOWN.iter().skip(index + 1).all(|(other, ..)| other != code), "{name}");
        }
    }

    #[test]
    fn a_message_has_name_code_and_advice() {
        let text = Hresult(0x8007_007e).to_string();
        assert!(
            text.contains("ERROR_MOD_NOT_FOUND")
                && text.contains("0x8007007e")
                && text.contains("noexec")
        );
        assert_eq!(Hresult(0x8123_4567).to_string(), "0x81234567");
    }
}
