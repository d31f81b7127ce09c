//! What symbolization may ask of the process table.

use super::{ImageFile, ImageResolver};
use perfusion_host::process::{ProcessTable, start_ticks};
use perfusion_model::frame::{ImageId, ProcessId};

impl ImageResolver for ProcessTable {
    fn image(&self, image: ImageId) -> Option<ImageFile<'_>> {
        let image = ProcessTable::image(self, image)?;
        // What was written over it has other names at the same places.
        let file = image.file().filter(|_| !image.is_overwritten());
        Some(ImageFile { path: &image.path, file, build_id: image.build_id.as_deref() })
    }

    fn mapped_by(&self, image: ImageId) -> Option<u32> {
        ProcessTable::mapped_by(self, image)
    }

    fn image_bytes(&self, image: ImageId) -> Option<&[u8]> {
        ProcessTable::image(self, image)?.bytes()
    }

    fn function_start(&self, image: ImageId, address: u64) -> Option<u64> {
        ProcessTable::image(self, image)?.loaded_function(address)
    }

    fn language_data(&self, image: ImageId, address: u64) -> Option<u64> {
        ProcessTable::image(self, image)?.loaded_language_data(address)
    }

    fn live_pid(&self, process: ProcessId) -> Option<u32> {
        let info = self.info(process)?;
        // A pid names the same process only while its start time is the same.
        let same = self.id(info.pid) == Some(process)
            && info.start_ticks.is_some_and(|ticks| start_ticks(info.pid) == Some(ticks));
        same.then_some(info.pid)
    }
}
