//! Kernel symbols from `/proc/kallsyms`, by blazesym. The table is parsed per batch and dropped again: it costs some 20 MB, and
//! after the first window new kernel addresses are rare.

use blazesym::MaybeDefault;
use blazesym::symbolize::source::{Kernel, Source};
use blazesym::symbolize::{Input, Symbolized, Symbolizer};

/// The name of each address, `None` where there is none (or where the kernel hides its addresses).
#[must_use]
pub fn names(addresses: &[u64]) -> Vec<Option<String>> {
    if addresses.is_empty() {
        return Vec::new();
    }
    // kallsyms has modules and BPF programs too, and is already relocated; a vmlinux would only add lines.
    let source =
        Source::Kernel(Kernel { vmlinux: MaybeDefault::None, debug_syms: false, ..Kernel::default() });
    let symbolizer = Symbolizer::builder().enable_code_info(false).enable_inlined_fns(false).build();
    let found = match symbolizer.symbolize(&source, Input::AbsAddr(addresses)) {
        Ok(found) => found,
        Err(error) => {
            tracing::warn!(%error, "kernel symbols not read: /proc/kallsyms");
            return vec![None; addresses.len()];
        }
    };
    let name = |symbol: Symbolized<'_>| symbol.into_sym().map(|symbol| symbol.name.into_owned());
    found.into_iter().map(name).collect()
}

/// The running kernel's build id, from `/sys/kernel/notes` (the same note an ELF file has).
#[must_use]
pub fn build_id() -> Option<Vec<u8>> {
    build_id_in_notes(&std::fs::read("/sys/kernel/notes").ok()?)
}

/// Finds `NT_GNU_BUILD_ID` (3) of owner `GNU` in ELF notes.
fn build_id_in_notes(mut notes: &[u8]) -> Option<Vec<u8>> {
    let word = |bytes: &[u8], at: usize| -> Option<usize> {
        let word: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_ne_bytes(word)).ok()
    };
    loop {
        let (owner_len, len, kind) = (word(notes, 0)?, word(notes, 4)?, word(notes, 8)?);
        let owner = notes.get(12..12usize.checked_add(owner_len)?)?;
        let start = 12usize.checked_add(owner_len.checked_next_multiple_of(4)?)?;
        let description = notes.get(start..start.checked_add(len)?)?;
        if kind == 3 && owner == b"GNU\0" {
            return Some(description.to_vec());
        }
        notes = notes.get(start.checked_add(len.checked_next_multiple_of(4)?)?..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_build_id_among_notes_and_survives_any_cut() {
        let mut notes = Vec::new();
        for (kind, owner, description) in
            [(1u32, &b"Linux\0"[..], &[9u8][..]), (3, b"GNU\0", &[1, 2, 3, 4, 5])]
        {
            notes.extend(u32::try_from(owner.len()).unwrap().to_ne_bytes());
            notes.extend(u32::try_from(description.len()).unwrap().to_ne_bytes());
            notes.extend(kind.to_ne_bytes());
            for part in [owner, description] {
                notes.extend(part);
                notes.resize(notes.len().next_multiple_of(4), 0);
            }
        }
        assert_eq!(build_id_in_notes(&notes), Some(vec![1, 2, 3, 4, 5]));
        for cut in 0..notes.len() - 3 {
            assert_eq!(build_id_in_notes(&notes[..cut]), None);
        }
    }

    #[test]
    fn an_address_outside_the_kernel_has_no_name() {
        assert_eq!(names(&[]), Vec::<Option<String>>::new());
        assert_eq!(names(&[0x1000]), [None]);
    }
}
