//! Event streams of real runtimes, as `perfusion heap` reads them: a program that holds a list of
//! 100 nodes in a static field, surveyed on .NET 8 and .NET 10 (`heap/netN.nettrace.gz`; the
//! program's command line is cut to its names). And an assembly with static fields
//! (`heap/list.dll`, of the class `Mini` with the nested classes `Node` and `Other`).

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use flate2::read::GzDecoder;
use perfusion_dotnet::metadata::{Assembly, DeclaredField, NameBudget};
use perfusion_dotnet::nettrace::NettraceReader;
use perfusion_heap::dominators;
use perfusion_heap::graph::GraphBuilder;
use perfusion_heap::paths::{self, RetentionPaths};
use perfusion_heap::walk::{HeapSurvey, HeapWalk, Root, RootKind};
use std::collections::{HashMap, HashSet};

fn survey(stream: &[u8]) -> HeapSurvey {
    let mut reader = NettraceReader::new(GzDecoder::new(stream)).unwrap();
    let mut walk = HeapWalk::new(64 << 20);
    while reader.read(&mut |event| walk.event(event)).unwrap() {}
    assert!(walk.has_begun());
    walk.finish(reader.lost())
}

fn check(survey: &HeapSurvey, collections: u32) {
    assert_eq!((survey.malformed, survey.lost, survey.collections), (0, 0, collections));
    assert!(!survey.pause.is_zero());
    let nodes =
        survey.types.iter().position(|found| found.name == "Node").expect("the class of the nodes");
    // A header, a table pointer and two references each.
    assert_eq!((survey.types[nodes].objects, survey.types[nodes].bytes), (100, 3200));
    let unnamed: u64 =
        survey.types.iter().filter(|found| found.name.is_empty()).map(|found| found.objects).sum();
    assert_eq!(unnamed, 0);
    assert!(survey.root_counts[RootKind::Static as usize] > 10, "{:?}", survey.root_counts);

    let graph = survey.graph.as_ref().unwrap();
    assert_eq!(graph.len() as u64, survey.objects());
    let paths = RetentionPaths::find(graph, &survey.roots);
    let way = |number| -> Vec<String> {
        paths.way(number).iter().map(|&step| survey.step_name(step)).collect()
    };
    let held: Vec<(Vec<String>, u64)> = paths
        .ends()
        .map(|(number, node)| (way(number), node.objects))
        .filter(|(way, _)| way.contains(&"static field head".to_owned()))
        .collect();
    let step = |text: &str| text.to_owned();
    let list = vec![step("static field head"), step("Node")];
    let bodies = [list.clone(), vec![step("byte[]")]].concat();
    assert_eq!(held, [(list, 100), (bodies, 100)]);

    let dominated = dominators::find(graph, &survey.roots, survey.types.len());
    // Arrays of 0 to 99 bytes, each with 24 of head, in words of 8.
    let arrays: u64 = (0..100u64).map(|length| (24 + length).next_multiple_of(8)).sum();
    assert_eq!(dominated.by_type[nodes], 3200 + arrays);
}

#[test]
fn a_survey_of_net8_is_read() {
    // It collects, and walks, once more when the session that asked for it ends.
    check(&survey(include_bytes!("heap/net8.nettrace.gz")), 2);
}

#[test]
fn a_survey_of_net10_is_read() {
    check(&survey(include_bytes!("heap/net10.nettrace.gz")), 1);
}

#[test]
fn an_assembly_tells_the_classes_of_static_fields_and_nested_types() {
    let file = include_bytes!("heap/list.dll");
    let assembly = Assembly::of(file).unwrap();
    let mut found: HashMap<String, Vec<DeclaredField>> = HashMap::new();
    let wanted =
        HashSet::from(["head", "numbers", "array", "Constant", "<Name>k__BackingField", "Next"]);
    assembly.static_fields(&wanted, &mut found, &mut NameBudget::new(1 << 20));
    let field = |class: &str, type_name: Option<&str>| DeclaredField {
        class: class.to_owned(),
        type_name: type_name.map(str::to_owned),
    };
    let expected = [
        ("head", vec![field("Mini", Some("Node")), field("Mini+Other", Some("Node"))]),
        ("numbers", vec![field("Mini", Some("System.Collections.Generic.List`1"))]),
        ("array", vec![field("Mini", None), field("Mini+Other", None)]),
        ("<Name>k__BackingField", vec![field("Mini", None)]),
    ];
    let expected = expected.map(|(name, fields)| (name.to_owned(), fields)).into();
    assert_eq!(found, expected);
    let names: Vec<_> =
        (0x0200_0001..0x0200_0006).map(|token| assembly.class_names(token)).collect();
    assert!(names.contains(&Some(("Node".to_owned(), "Mini+Node".to_owned()))), "{names:?}");
    assert_eq!(
        (assembly.class_names(0x0100_0001), assembly.class_names(0x0200_00ff)),
        (None, None)
    );
    // A cut file is none, or has fewer names.
    for end in (0..file.len()).step_by(7) {
        if let Some(assembly) = Assembly::of(&file[..end]) {
            assembly.static_fields(&wanted, &mut HashMap::new(), &mut NameBudget::new(1 << 20));
        }
    }
    // No more than there is room for.
    let (mut found, mut room) = (HashMap::new(), NameBudget::new(2 * size_of::<DeclaredField>()));
    assembly.static_fields(&wanted, &mut found, &mut room);
    assert_eq!(
        (found.values().map(Vec::len).sum::<usize>(), room.bytes() < size_of::<DeclaredField>()),
        (1, true)
    );
}

/// Highest resident memory of this process so far, KiB.
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
#[ignore = "takes minutes and a gigabyte: cargo test -p perfusion --test heap forty -- --ignored"]
fn forty_million_objects_and_their_ways_fit_into_a_gibibyte() {
    const OBJECTS: u64 = 40_000_000;
    const BYTES: u64 = 104;
    let address = |object: u64| 0x7f00_0000_0000 + object * BYTES;
    let mut builder = GraphBuilder::new(1 << 30);
    // A tree of two branches each, and a third reference somewhere else.
    for object in 0..OBJECTS {
        let branches =
            [2 * object + 1, 2 * object + 2].into_iter().filter(|&branch| branch < OBJECTS);
        let type_index = u32::try_from(object % 3).unwrap();
        let references = branches.clone().count() as u64 + object % 2;
        builder.object(address(object), BYTES, type_index, references).unwrap();
        branches.for_each(|branch| builder.reference(address(branch)).unwrap());
        if object % 2 == 1 {
            builder.reference(address(object * 7919 % OBJECTS)).unwrap();
        }
    }
    let mut places = [builder.place(address(0)).unwrap()];
    let graph = builder.finish(&mut places).unwrap();
    assert!(graph.bytes() + paths::bytes_needed(&graph) < 1 << 30);
    let roots = [Root { kind: RootKind::Static, field: None, object: places[0] }];
    let found: u64 =
        RetentionPaths::find(&graph, &roots).ends().map(|(_, node)| node.objects).sum();
    assert_eq!(found, OBJECTS);
    assert!(peak_kib() < 1 << 20, "{} KiB", peak_kib());
}
