//! Text of `/proc/PID/maps` → mappings.

use perfusion_host::process::mapping::{
    Mapping, Mappings, anonymous_range, parse_fields, parse_maps_line,
};
use std::hint::black_box;

/// Enough for a dozen lines.
const MAX_BYTES: usize = 1024;

pub(crate) fn run(data: &[u8]) {
    let mut mappings = Mappings::default();
    let data = data.get(..MAX_BYTES).unwrap_or(data);
    for line in data.split(|&byte| byte == b'\n') {
        let line = String::from_utf8_lossy(line);
        if let Some(range) = parse_fields(&line).and_then(|fields| anonymous_range(&fields, (0, 1)))
        {
            assert!(range.start < range.end);
        }
        if let Some(mapping) = parse_maps_line(1, &line).as_ref().and_then(Mapping::new) {
            let start = mapping.range.start;
            let inode = mapping.inode;
            black_box(mappings.insert(mapping));
            assert_eq!(
                mappings.find(start).map(|found| found.inode),
                Some(inode),
                "what came last is there"
            );
        }
    }
    let sorted: Vec<&Mapping> = mappings.iter().collect();
    assert!(
        sorted.windows(2).all(|two| two[0].range.end <= two[1].range.start),
        "sorted and apart"
    );
    assert!(sorted.iter().all(|mapping| mapping.range.start < mapping.range.end), "none is empty");
}
