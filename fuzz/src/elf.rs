//! An ELF file → segments, build id, a thread-local variable, unwind sections → rule.

use perfusion_host::process::images::ImageCache;
use std::hint::black_box;

/// Three sections of what one may have, and the indexes of two.
const MAX_INFLATED_BYTES: usize = 3 * (32 << 20) + 2 * (48 << 20);

pub(crate) fn run(data: &[u8]) {
    let mut images = ImageCache::default();
    let Ok(id) = images.vdso(data.to_vec()) else { return };
    assert_eq!(images.vdso(data.to_vec()).ok(), Some(id), "the same bytes are the same image");
    let entry = data
        .get(24..)
        .and_then(|rest| rest.first_chunk::<8>())
        .map_or(0, |at| u64::from_le_bytes(*at));
    let first = images.get(id).and_then(|image| {
        black_box(&image.build_id);
        black_box(image.elf_address(entry));
        black_box(image.thread_variable("otel_thread_ctx_v1", 8));
        image.elf_address(0x1000)
    });
    if let Some(unwind) = images.unwind(id) {
        for address in [Some(entry), first].into_iter().flatten() {
            black_box(unwind.rule(address).ok());
            black_box(unwind.is_plt(address));
        }
        // Compressed sections grow, up to a bound.
        let most = 4 * data.len() + MAX_INFLATED_BYTES;
        assert!(
            unwind.size_bytes() <= most,
            "{} bytes held of {}",
            unwind.size_bytes(),
            data.len()
        );
    }
}
