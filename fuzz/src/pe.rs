//! A PE file → sections, exception directory, UNWIND_INFO and code → rule.

use crate::input::Input;
use perfusion_host::process::images::ImageCache;
use perfusion_unwind::native::NATIVE;
use std::hint::black_box;

pub(crate) fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let rvas = [input.u32(), u32::from(input.u16())];
    let file = input.rest();
    let mut images = ImageCache::default();
    let Ok(id) = images.vdso(file.to_vec()) else { return };
    black_box(images.get(id).and_then(|image| image.rva(u64::from(rvas[1]))));
    let Some(directory) = images.exceptions(id, u64::from(rvas[1])) else { return };
    assert!(directory.size_bytes() <= file.len(), "a file makes us hold more than itself");
    let Some((_, image)) = images.get(id).and_then(|image| image.pe_at(u64::from(rvas[1]))) else {
        return;
    };
    for rva in rvas {
        if let Some(function) = directory.function(NATIVE, &image, rva) {
            assert!((function.begin..function.end).contains(&rva));
            for exact in [true, false] {
                black_box(directory.rule(NATIVE, &image, function, rva, exact).ok());
            }
        }
    }
}
