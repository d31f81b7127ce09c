//! libFuzzer's program: one for all targets, because each would be linked for seconds;
//! `PERFUSION_FUZZ_TARGET` names the one to run.
#![no_main]

use fuzz::{TARGETS, Target};
use libfuzzer_sys::fuzz_target;
use std::sync::OnceLock;

static TARGET: OnceLock<Target> = OnceLock::new();

fuzz_target!(
    init: {
        let name = std::env::var("PERFUSION_FUZZ_TARGET").unwrap_or_default();
        let Some((_, target)) = TARGETS.iter().find(|(known, _)| *known == name) else {
            eprintln!("PERFUSION_FUZZ_TARGET={name}: expected one of \
                       {:?}", TARGETS.map(|(known, _)| known));
            std::process::exit(2);
        };
        TARGET.get_or_init(|| *target);
    },
    |data: &[u8]| {
        if let Some(target) = TARGET.get() {
            target(data);
        }
    }
);
