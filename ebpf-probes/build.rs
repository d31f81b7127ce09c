//! Tells the crate which machine the probes will run on: the target is `bpf` on all of them. As
//! aya-ebpf does, whose bindings must be of the same one: by `--cfg bpf_target_arch`, else
//! `AYA_BPF_TARGET_ARCH`, else it is the building host's.

use std::env;

fn main() {
    println!("cargo::rerun-if-env-changed=AYA_BPF_TARGET_ARCH");
    if env::var_os("CARGO_CFG_BPF_TARGET_ARCH").is_none() {
        let host = env::var("HOST").unwrap_or_default();
        let host = host.split('-').next().unwrap_or_default().to_owned();
        let machine = env::var("AYA_BPF_TARGET_ARCH").unwrap_or(host);
        println!("cargo::rustc-cfg=bpf_target_arch=\"{machine}\"");
    }
}
