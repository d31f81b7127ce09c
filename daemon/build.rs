//! Puts the eBPF object and the shim into the binary. `cargo xtask build` makes both and names them
//! by environment; a plain `cargo build` has neither toolchain and says what it left out, here and
//! again when a command needs the missing part.

use std::{env, fs, path::PathBuf};

fn main() {
    for (variable, file) in [("PERFUSION_PROBES", "probes.o"), ("PERFUSION_SHIM", "shim.so")] {
        println!("cargo::rerun-if-env-changed={variable}");
        let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default()).join(file);
        let bytes = match env::var_os(variable) {
            Some(path) => {
                println!("cargo::rerun-if-changed={}", path.to_string_lossy());
                fs::read(&path).unwrap_or_else(|error| {
                    println!("cargo::error={variable}={}: {error}", path.to_string_lossy());
                    Vec::new()
                })
            }
            None => {
                println!(
                    "cargo::warning=built without {file}: `cargo xtask build` makes the complete \
                     program"
                );
                Vec::new()
            }
        };
        if let Err(error) = fs::write(&out, bytes) {
            println!("cargo::error={}: {error}", out.display());
        }
    }
}
