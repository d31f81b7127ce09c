//! Programs and the eBPF object as they are shipped: without debug information. A program's own
//! lies beside it as a file, which a debugger finds by the link in the program or by the build id.

use std::{ffi::OsString, path::Path, process::Command};

use anyhow::{Result, bail};

use crate::exec::output;

/// Sections of debug information, and of what relocates it.
const DEBUG: [&str; 3] = [".debug_", ".zdebug_", ".rel.debug_"];
/// Names the file with a program's debug information.
const LINK: &str = ".gnu_debuglink";
/// What the kernel and aya read of the eBPF object: types, and the lines of the verifier's log.
const KEPT: [&str; 2] = [".BTF", ".BTF.ext"];

/// Writes `program` without debug information to `shipped`, and that to `debug`. Symbols stay in
/// both: stacks of the program itself have names.
pub(crate) fn program(program: &Path, shipped: &Path, debug: &Path) -> Result<()> {
    output(
        Command::new("objcopy")
            .args(["--only-keep-debug", "--compress-debug-sections"])
            .args([program, debug]),
    )?;
    let mut link = OsString::from("--add-gnu-debuglink=");
    link.push(debug);
    output(Command::new("objcopy").arg("--strip-debug").arg(link).args([program, shipped]))?;
    check(shipped, &[LINK])
}

/// Writes the eBPF object without DWARF to `shipped`, with the `objcopy` of its own LLVM: GNU's
/// does not know the machine.
pub(crate) fn probes(objcopy: &Path, object: &Path, shipped: &Path) -> Result<()> {
    output(Command::new(objcopy).arg("--strip-debug").args([object, shipped]))?;
    check(shipped, &KEPT)
}

/// Fails if a file has debug information, or lacks one of the sections.
fn check(file: &Path, kept: &[&str]) -> Result<()> {
    let listed = output(Command::new("readelf").args(["--wide", "--sections"]).arg(file))?;
    let broken = broken(&sections(&listed), kept);
    if !broken.is_empty() {
        bail!("{}: {}", file.display(), broken.join("; "));
    }
    Ok(())
}

/// Names of the sections that `readelf --wide --sections` lists.
fn sections(listed: &str) -> Vec<&str> {
    let name = |line: &'_ str| -> Option<usize> { line.find("] .").map(|at| at + 2) };
    listed
        .lines()
        .filter(|line| line.trim_start().starts_with('['))
        .filter_map(|line| line.get(name(line)?..)?.split_whitespace().next())
        .collect()
}

/// What is wrong with a file of these sections.
fn broken(sections: &[&str], kept: &[&str]) -> Vec<String> {
    let is_debug = |name: &str| DEBUG.iter().any(|prefix| name.starts_with(prefix));
    let surplus = sections.iter().filter(|name| is_debug(name));
    let missing = kept.iter().filter(|name| !sections.contains(name));
    surplus
        .map(|name| format!("expected no debug information, found {name}"))
        .chain(missing.map(|name| format!("expected a section {name}, found none")))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path, process::Command};

    use super::{KEPT, broken, program, sections};
    use crate::{exec::output, paths::WorkspacePaths};

    const OBJECT: &str = "\
There are 6 section headers, starting at offset 0x10f8:

Section Headers:
  [Nr] Name              Type            Address          Off    Size   ES Flg Lk Inf Al
  [ 0]                   NULL            0000000000000000 000000 000000 00      0   0  0
  [ 1] .text             PROGBITS        0000000000000000 000040 000000 00  AX  0   0  4
  [12] .BTF              PROGBITS        0000000000000000 000d10 0001b9 00      0   0  4
  [13] .rel.BTF          REL             0000000000000000 000ed0 000010 10   I 14  12  8
  [14] .BTF.ext          PROGBITS        0000000000000000 000ecc 0000a0 00      0   0  4
";

    #[test]
    fn an_object_without_dwarf_and_with_btf_passes() {
        let found = sections(OBJECT);
        assert_eq!(found, [".text", ".BTF", ".rel.BTF", ".BTF.ext"]);
        assert!(broken(&found, &KEPT).is_empty());
    }

    #[test]
    fn dwarf_that_stayed_and_btf_that_went_are_named() {
        let found = OBJECT.replace("] .text ", "] .debug_info ").replace("] .BTF.ext ", "] .x ");
        assert_eq!(
            broken(&sections(&found), &KEPT),
            [
                "expected no debug information, found .debug_info",
                "expected a section .BTF.ext, found none"
            ]
        );
    }

    #[test]
    fn a_program_names_its_debug_information_and_both_have_one_build_id() {
        let folder = WorkspacePaths::find().unwrap().target.join("strip-test");
        fs::create_dir_all(&folder).unwrap();
        let (source, built) = (folder.join("main.c"), folder.join("built"));
        fs::write(&source, "int main(void) { return 0; }\n").unwrap();
        let compile = ["-g", "-Wl,--build-id", "-o"];
        output(Command::new("cc").args(compile).args([&built, &source])).unwrap();
        let (shipped, debug) = (folder.join("shipped"), folder.join("shipped.debug"));
        program(&built, &shipped, &debug).unwrap();
        let read = |file: &Path| {
            let options = ["--wide", "--notes", "--sections"];
            output(Command::new("readelf").args(options).arg(file)).unwrap()
        };
        let build_id = |text: &str| {
            let line = text.lines().find(|line| line.contains("Build ID: ")).unwrap();
            line.trim().to_owned()
        };
        let (of_shipped, of_debug) = (read(&shipped), read(&debug));
        assert_eq!(build_id(&of_shipped), build_id(&of_debug));
        assert!(sections(&of_shipped).contains(&".symtab"));
        assert!(sections(&of_debug).contains(&".debug_info"));
        assert!(fs::read(&shipped).unwrap().windows(13).any(|text| text == b"shipped.debug"));
        fs::remove_dir_all(&folder).unwrap();
    }
}
