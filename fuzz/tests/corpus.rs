//! Every target on every file of its corpus, and on that file cut off and with bytes changed: what
//! the fuzzer found once stays found.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use fuzz::{TARGETS, Target};
use std::fs;
use std::path::{Path, PathBuf};

/// Changes tried per file, of each sort.
const CHANGES: usize = 64;

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus")
}

fn around(target: Target, seed: &[u8]) {
    target(seed);
    for at in (0..seed.len()).step_by(seed.len().div_ceil(CHANGES).max(1)) {
        target(&seed[..at]);
        for value in [0, 0x7f, 0xff, seed[at].wrapping_add(1)] {
            let mut changed = seed.to_vec();
            changed[at] = value;
            target(&changed);
        }
    }
}

#[test]
fn every_target_holds_on_its_corpus_and_around_it() {
    for (name, target) in TARGETS {
        target(&[]);
        let folder = corpus().join(name);
        let files: Vec<PathBuf> =
            fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(!files.is_empty(), "{}: no corpus", folder.display());
        for file in files {
            println!("{}", file.display());
            around(target, &fs::read(&file).unwrap());
        }
    }
}

#[test]
fn every_corpus_has_its_target() {
    for entry in fs::read_dir(corpus()).unwrap() {
        let name = entry.unwrap().file_name();
        assert!(
            TARGETS.iter().any(|(target, _)| name == *target),
            "{}: no such target",
            name.display()
        );
    }
}
