//! The shim as a `no_std` cdylib: built with its own flags in its own target folder, then checked.
//! One file serves glibc of any age and musl, because it needs nothing but a few symbols every C
//! library has.

use std::{fs, process::Command};

use anyhow::{Context, Result, bail};

use crate::{
    exec::{StepLog, cargo, output, run, write_if_changed},
    paths::WorkspacePaths,
};

/// Stacks of allocations are walked from inside the library: frame pointers for others, unwind
/// tables for us. On aarch64 atomics that ask the C library which instructions there are would need
/// `getauxval`.
const FLAGS: &str = if cfg!(target_arch = "aarch64") {
    "-C force-frame-pointers=yes -C force-unwind-tables=yes -C target-feature=-outline-atomics"
} else {
    // Loops over tables of 64 slots, unrolled, were a tenth of the library.
    "-C force-frame-pointers=yes -C force-unwind-tables=yes -C llvm-args=-unroll-full-max-count=4"
};
const MOST_BYTES: usize = 128 * 1024;

/// Symbols that may be left for the loader to find.
const BOUND_AT_LOAD: [&str; 6] = [
    "getauxval",
    "pthread_attr_destroy",
    "pthread_attr_init",
    "pthread_attr_setstacksize",
    "pthread_create",
    "pthread_join",
];
/// Symbols the runtime looks up, and nothing else is exported.
const EXPORTS: [&str; 2] = ["DllCanUnloadNow", "DllGetClassObject"];

/// Builds and checks the shim.
pub(crate) fn build(paths: &WorkspacePaths, steps: &StepLog) -> Result<()> {
    steps.step("building the shim");
    let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let target = paths.target.join("shim");
    run(cargo(paths)
        .args(["rustc", "--quiet", "--release", "--package", "profiler-shim", "--lib"])
        .args([
            "--features",
            "freestanding",
            "--crate-type",
            "cdylib",
            "--target",
            triple.as_str(),
            "--target-dir",
        ])
        .arg(&target)
        .args(["--", "-C", "link-args=-nostdlib -nostartfiles -Wl,-z,now,--build-id=sha1"])
        .current_dir(&paths.root)
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env("RUSTFLAGS", FLAGS)
        // One more is 2 KB, and nothing that can be measured.
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "2")
        .env("CARGO_PROFILE_RELEASE_PANIC", "abort")
        .env("CARGO_PROFILE_RELEASE_LTO", "fat")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
        // Local symbols were a tenth of the file. No process maps them, and its unwind tables stay.
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols"))?;
    let built = target.join(&triple).join("release/libprofiler_shim.so");
    let bytes = fs::read(&built)
        .with_context(|| format!("{}: expected the build to leave it there", built.display()))?;
    let read = output(
        Command::new("readelf")
            .args(["--wide", "--dynamic", "--dyn-syms", "--sections"])
            .arg(&built),
    )?;
    check(&Facts::from_readelf(&read), bytes.len())
        .with_context(|| format!("{}", built.display()))?;
    write_if_changed(&paths.shim(), &bytes)
}

/// What `readelf` says about a shared library.
#[derive(Debug, Default, PartialEq, Eq)]
struct Facts {
    /// Libraries it needs.
    needed: Vec<String>,
    /// Symbols it leaves undefined.
    undefined: Vec<String>,
    /// Symbols it exports.
    exported: Vec<String>,
    /// Whether it has unwind tables.
    unwind_tables: bool,
}

impl Facts {
    fn from_readelf(text: &str) -> Facts {
        let mut facts = Facts::default();
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words.as_slice() {
                [_, "(NEEDED)", .., name] => facts.needed.push((*name).to_owned()),
                // Num: Value Size Type Bind Vis Ndx Name
                [_, _, _, _, _, _, "UND", name] => facts.undefined.push((*name).to_owned()),
                [number, _, _, _, "GLOBAL" | "WEAK", "DEFAULT", index, name]
                    if number.ends_with(':') && index.parse::<u16>().is_ok() =>
                {
                    facts.exported.push((*name).to_owned());
                }
                _ if line.contains("] .eh_frame ") => facts.unwind_tables = true,
                _ => {}
            }
        }
        facts.exported.sort();
        facts
    }
}

/// Fails with every rule the library breaks.
fn check(facts: &Facts, bytes: usize) -> Result<()> {
    let mut broken = Vec::new();
    if !facts.needed.is_empty() {
        broken.push(format!("needs libraries: {}", facts.needed.join(", ")));
    }
    let surplus: Vec<&str> = facts
        .undefined
        .iter()
        .map(String::as_str)
        .filter(|name| !BOUND_AT_LOAD.contains(name))
        .collect();
    if surplus.contains(&"perfusion_shim_has_a_panic_path") {
        broken.push(
            "a panic path survived optimisation: the panic handler is referred to".to_owned(),
        );
    }
    if !surplus.is_empty() {
        broken.push(format!(
            "undefined symbols other than {}: {}",
            BOUND_AT_LOAD.join(", "),
            surplus.join(", ")
        ));
    }
    if facts.exported != EXPORTS {
        broken.push(format!(
            "expected the exports {}, found {}",
            EXPORTS.join(", "),
            facts.exported.join(", ")
        ));
    }
    if !facts.unwind_tables {
        broken.push("no .eh_frame: stacks cannot be walked out of it".to_owned());
    }
    if bytes > MOST_BYTES {
        broken.push(format!("expected at most {MOST_BYTES} bytes, found {bytes}"));
    }
    if broken.is_empty() { Ok(()) } else { bail!("{}", broken.join("\n")) }
}

#[cfg(test)]
mod tests {
    use super::{Facts, check};

    const GOOD: &str = "\
  [ 9] .eh_frame         PROGBITS        0000000000001f28 001f28 000a44 00   A  0   0  8
     1: 0000000000000000     0 NOTYPE  GLOBAL DEFAULT  UND pthread_create
     3: 0000000000004500    21 FUNC    GLOBAL DEFAULT   11 DllGetClassObject
     2: 0000000000004520     6 FUNC    GLOBAL DEFAULT   11 DllCanUnloadNow
";

    #[test]
    fn a_library_as_it_should_be_passes() {
        check(&Facts::from_readelf(GOOD), 40_000).unwrap();
    }

    #[test]
    fn each_broken_rule_is_named() {
        let panics = "     4: 0000000000000000     0 NOTYPE  GLOBAL DEFAULT  UND \
             perfusion_shim_has_a_panic_path\n";
        let needs = " 0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]\n";
        let exports = "     5: 0000000000004500    21 FUNC    GLOBAL DEFAULT   11 memcpy\n";
        for (more, bytes, expected) in [
            (panics, 1, "a panic path survived"),
            (panics, 1, "undefined symbols other than"),
            (needs, 1, "needs libraries: [libc.so.6]"),
            (exports, 1, "found DllCanUnloadNow, DllGetClassObject, memcpy"),
            ("", 131_073, "at most 131072 bytes, found 131073"),
        ] {
            let text = format!("{GOOD}{more}");
            let error = check(&Facts::from_readelf(&text), bytes).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let bare = GOOD.replace(".eh_frame", ".other");
        let error = check(&Facts::from_readelf(&bare), 1).unwrap_err().to_string();
        assert!(error.contains("no .eh_frame"), "{error}");
    }
}
