//! Prints the unwind rule at the entry point of an ELF file:
//! `cargo run -p perfusion-unwind --example rule_of_entry -- /bin/true`.

use object::{Object as _, ObjectSection as _};
use perfusion_unwind::eh_frame::{CfiSection, FdeRule, UnwindSections};
use std::error::Error;

fn rule_of_entry(path: &str) -> Result<(u64, FdeRule), Box<dyn Error>> {
    let bytes = std::fs::read(path)?;
    let file = object::File::parse(&*bytes)?;
    let section = |name| {
        let section = file.section_by_name(name)?;
        Some(CfiSection { address: section.address(), bytes: section.data().ok()?.to_vec() })
    };
    let sections = [".eh_frame_hdr", ".eh_frame", ".debug_frame"].map(section);
    let [header, eh_frame, debug_frame] = sections;
    let entry = file.entry();
    Ok((entry, UnwindSections::new(header, eh_frame, debug_frame).rule(entry)?))
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "/proc/self/exe".to_owned());
    let (entry, found) = rule_of_entry(&path)?;
    println!("{path}: entry {entry:#x} in {:#x?} by {:?}", found.function, found.table);
    println!("CFA: {:?}, return address: {:?}", found.rule.cfa, found.rule.return_address);
    Ok(())
}

#[test]
fn nobody_called_the_entry_point() -> Result<(), Box<dyn Error>> {
    let (entry, found) = rule_of_entry("/proc/self/exe")?;
    assert!(found.function.contains(&entry) && found.rule.is_thread_start());
    Ok(())
}
