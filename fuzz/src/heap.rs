//! The event stream of a runtime, and the events of a walk over its heap → types, graph, ways,
//! dominated sizes; its counts of allocations. Metadata of an assembly → names.

use crate::input::Input;
use perfusion_report::survey_profile;

use perfusion_dotnet::counts::tally::Tally;
use perfusion_dotnet::metadata::{Assembly, NameBudget};
use perfusion_dotnet::nettrace::{NettraceEvent, NettraceReader};
use perfusion_heap::dominators;
use perfusion_heap::paths::RetentionPaths;
use perfusion_heap::walk::{HeapSurvey, HeapWalk};
use std::collections::{HashMap, HashSet};
use std::hint::black_box;
use std::time::SystemTime;

/// Memory for the graph.
const LIMIT_BYTES: usize = 8 << 20;

pub(crate) fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let (mut walk, mut tally) = (HeapWalk::new(LIMIT_BYTES), Tally::new(None));
    let mut see_event = |event: NettraceEvent<'_>| {
        walk.event(event);
        tally.event(event);
    };
    let mut lost = 0;
    let kind = input.u8() % 3;
    if kind == 2 {
        return names(input.rest());
    }
    if kind == 0 {
        let Ok(mut reader) = NettraceReader::new(input.rest()) else { return };
        while let Ok(true) = reader.read(&mut see_event) {}
        lost = reader.lost();
    } else {
        for time_ns in 0..64 {
            let id = u32::from(input.u8() % 40);
            see_event(NettraceEvent { id, thread: 1, time_ns, payload: input.part() });
        }
    }
    see(&walk.finish(lost));
    black_box(tally.finish(lost, None).to_string());
}

fn names(file: &[u8]) {
    let Some(assembly) = Assembly::of(file) else { return };
    let mut found = HashMap::new();
    assembly.static_fields(
        &HashSet::from(["head", "array", "numbers"]),
        &mut found,
        &mut NameBudget::new(1 << 20),
    );
    assert!(found.len() <= 3, "only what is asked for");
    for token in [0x0200_0001, 0x0200_0003, 0x02ff_ffff, 0x0100_0001] {
        black_box(assembly.class_names(token));
    }
}

/// Works out everything, and checks that sums are the same however they are made.
fn see(survey: &HeapSurvey) {
    let Ok(graph) = &survey.graph else { return };
    let paths = RetentionPaths::find(graph, &survey.roots);
    let (mut objects, mut bytes) = (0, 0u64);
    for (number, node) in paths.ends() {
        assert!(!paths.way(number).is_empty(), "an object ends somewhere");
        objects += node.objects;
        bytes = bytes.saturating_add(node.bytes);
    }
    assert_eq!(objects, graph.len() as u64, "every object is in one place");
    assert_eq!(objects, survey.objects(), "and counted by its type");
    if dominators::bytes_needed(graph) <= LIMIT_BYTES {
        let dominated = dominators::find(graph, &survey.roots, survey.types.len());
        assert!(
            dominated.by_type.iter().all(|&sum| sum <= bytes),
            "nothing dominates more than there is"
        );
    }
    let made = survey_profile::profile(survey, &paths, SystemTime::UNIX_EPOCH, &[]);
    assert!(made.is_ok(), "{made:?}");
    black_box(made.is_ok());
}
