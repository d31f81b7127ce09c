//! The byte map in `docs/shim-protocol.md` and the constants say the same; so do the tables of
//! records and requests.
#![cfg(not(loom))]
#![allow(clippy::expect_used, reason = "a failed expectation is a failed test")]

use profiler_protocol::layout::{
    COMMIT_OFFSET_AT, COUNTERS_AT, CREATED_AT, DATA_OFFSET_AT, EVENT_HEAD_AT, EVENT_TAIL_AT,
    FEATURES_AT, Geometry, HEARTBEAT_AT, INSTANCE_AT, LISTENER_AT, MAGIC_AT, OWNER_AT, PERIOD_AT,
    PID_AT, REGION_BYTES_AT, REQUEST_HEAD_AT, REQUEST_OFFSET_AT, REQUEST_SLOTS_AT, REQUEST_TAIL_AT,
    RUNTIME_AT, SLOTS_AT, STATE_AT, UNITS_AT, VERSION_AT,
};
use profiler_protocol::request::Request;

const PAGE: &str = include_str!("../../docs/shim-protocol.md");

/// The cells of the page's table rows.
fn rows() -> Vec<Vec<&'static str>> {
    PAGE.lines()
        .filter(|line| line.starts_with("| "))
        .map(|line| line.trim_matches('|').split(" | ").map(str::trim).collect())
        .collect()
}

#[test]
fn the_byte_map_is_the_codes() {
    let code = [
        ("magic", MAGIC_AT),
        ("version", VERSION_AT),
        ("region_bytes", REGION_BYTES_AT),
        ("request_offset", REQUEST_OFFSET_AT),
        ("request_slots", REQUEST_SLOTS_AT),
        ("commit_offset", COMMIT_OFFSET_AT),
        ("data_offset", DATA_OFFSET_AT),
        ("units", UNITS_AT),
        ("instance", INSTANCE_AT),
        ("pid", PID_AT),
        ("created_ns", CREATED_AT),
        ("runtime", RUNTIME_AT),
        ("features", FEATURES_AT),
        ("owner", OWNER_AT),
        ("slots", SLOTS_AT),
        ("event_head", EVENT_HEAD_AT),
        ("request_tail", REQUEST_TAIL_AT),
        ("state", STATE_AT),
        ("event_tail", EVENT_TAIL_AT),
        ("listener", LISTENER_AT),
        ("heartbeat", HEARTBEAT_AT),
        ("period_ns", PERIOD_AT),
        ("request_head", REQUEST_HEAD_AT),
        ("counters", COUNTERS_AT),
    ];
    let page: Vec<(&str, u64)> = rows()
        .iter()
        .filter_map(|row| {
            let offset = u64::from_str_radix(row.first()?.strip_prefix("0x")?, 16).ok()?;
            Some((*row.get(2)?, offset))
        })
        .filter(|(name, _)| *name != "request ring")
        .collect();
    assert_eq!(page, code);
}

#[test]
fn the_default_region_is_laid_out_as_the_page_says() {
    let default = Geometry::DEFAULT;
    let sentence = format!(
        "{} request slots at {:#x}, commit words at {:#x}, data at {:#x}, {:#x} bytes in all",
        "2,048",
        default.request_offset(),
        default.commit_offset(),
        default.data_offset(),
        default.region_bytes()
    );
    assert!(PAGE.contains(&sentence), "{sentence}");
    assert_eq!(default.request_slots, 2048);
    assert_eq!(Geometry::new(3000, 8), None);
    assert_eq!(Geometry::new(1 << 21, 8), None);
    assert_eq!(Geometry::new(4096, 0), None);
}

#[test]
fn every_request_has_its_row() {
    for (request, name) in [
        (Request::Name { address: 0, seen_ns: 0 }, "Name"),
        (Request::Detach, "Detach"),
        (Request::Settings { handles: 0, samples: 0 }, "Settings"),
        (Request::Heard, "Heard"),
    ] {
        let kind = request.words()[0].to_string();
        assert!(
            rows().iter().any(|r| r.first() == Some(&kind.as_str()) && r.get(1) == Some(&name)),
            "{name}"
        );
    }
}
