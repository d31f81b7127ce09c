//! What pprof's reader takes and refuses is taken and refused here, with its reasons.

use super::{ReadRefusal, read};
use crate::PprofError;
use crate::proto::{Function, Label, Line, Location, Mapping, Profile, Sample, ValueType};
use prost::Message as _;

/// `main` calls `f`, with a sample type `cpu`.
fn good() -> Profile {
    let texts = ["", "cpu", "nanoseconds", "f", "main", "key", "value", "malloc", "malloc|free"];
    let location = |id| Location {
        id,
        line: vec![Line { function_id: id, ..Line::default() }],
        ..Location::default()
    };
    Profile {
        string_table: texts.map(str::to_owned).to_vec(),
        sample_type: vec![ValueType { r#type: 1, unit: 2 }],
        function: (1..=2)
            .zip(3..)
            .map(|(id, name)| Function { id, name, ..Function::default() })
            .collect(),
        location: (1..=2).map(location).collect(),
        sample: vec![Sample { location_id: vec![1, 2], value: vec![10], label: Vec::new() }],
        ..Profile::default()
    }
}

fn with(change: impl FnOnce(&mut Profile)) -> Profile {
    let mut profile = good();
    change(&mut profile);
    profile
}

/// What is said where one is read, and what it became.
fn reading(change: impl FnOnce(&mut Profile)) -> (Profile, String) {
    let reading = read(&with(change).encode_to_vec()).unwrap();
    (reading.profile, reading.remarks.join("\n"))
}

fn refusal(bytes: &[u8]) -> ReadRefusal {
    match read(bytes).unwrap_err() {
        PprofError::Refused(refusal) => refusal,
        other => panic!("{other}"),
    }
}

fn refused(change: impl FnOnce(&mut Profile)) -> ReadRefusal {
    refusal(&with(change).encode_to_vec())
}

#[test]
fn a_valid_profile_is_read_as_it_is_and_without_a_word() {
    assert_eq!(reading(|_| {}), (good(), String::new()));
}

#[test]
fn labels_that_stand_twice_without_key_or_with_text_and_number_are_read() {
    let label = |key, str, num| Label { key, str, num, ..Label::default() };
    let (profile, remarks) = reading(|p| {
        p.sample[0].label =
            vec![label(5, 6, 0), label(5, 3, 0), label(0, 6, 0), label(5, 6, 7), label(5, 0, 8)];
    });
    let read = [label(5, 6, 0), label(5, 3, 0), label(0, 6, 0), label(5, 6, 0), label(5, 0, 8)];
    assert_eq!(profile.sample[0].label, read);
    assert_eq!(remarks, "1 label is both text and number: the number is dropped");
    let (profile, remarks) = reading(|p| p.sample[0].label = vec![label(5, 0, 0)]);
    assert!(profile.sample[0].label.is_empty());
    assert_eq!(remarks, "1 label is neither text nor number: dropped");
}

#[test]
fn a_number_of_ours_may_be_zero() {
    let (profile, remarks) = reading(|p| {
        p.string_table[6] = "perfusion 1.0".to_owned();
        p.comment = vec![6];
        p.sample[0].label = vec![Label { key: 5, ..Label::default() }];
    });
    assert_eq!((profile.sample[0].label.len(), remarks.as_str()), (1, ""));
}

#[test]
fn a_mapping_that_is_not_in_the_table_is_none() {
    let (profile, remarks) = reading(|p| p.location[0].mapping_id = 9);
    assert_eq!(profile.location[0].mapping_id, 0);
    assert!(remarks.starts_with("1 location is of a mapping that is not in the file"), "{remarks}");
}

#[test]
fn a_default_type_that_does_not_exist_is_none_and_a_type_that_stands_twice_is_dropped() {
    let (profile, remarks) = reading(|p| p.default_sample_type = 3);
    assert_eq!(profile.default_sample_type, 0);
    assert!(remarks.contains("`f` is not among the sample types"), "{remarks}");
    let (profile, remarks) = reading(|p| {
        let unit = ValueType { r#type: 6, unit: 6 };
        p.sample_type.extend([unit, unit]);
        p.sample[0].value = vec![1, 2, 3];
    });
    assert_eq!((profile.sample_type.len(), &profile.sample[0].value[..]), (1, &[1][..]));
    assert_eq!(remarks, "1 sample type is in several columns: dropped");
}

#[test]
fn strings_that_are_not_utf8_are_read_and_stay_different() {
    let mut bytes = with(|p| p.string_table.push("\\xe9t".to_owned())).encode_to_vec();
    for text in [&b"\xe9t"[..], b"\xe8t", b"a\xff\xfeb"] {
        bytes.extend([0x32, u8::try_from(text.len()).unwrap()]);
        bytes.extend(text);
    }
    let reading = read(&bytes).unwrap();
    let ours = &reading.profile.string_table[9..];
    assert_eq!(ours, ["\\xe9t", "\\xe9t\u{fffd}", "\\xe8t", "a\\xff\\xfeb"]);
    assert_eq!(
        reading.remarks,
        ["3 names and texts are not UTF-8: wrong bytes are shown as \\xNN"]
    );
}

#[test]
fn frames_that_the_profile_wants_dropped_are_dropped() {
    // `main` calls `f` calls `malloc` calls `free`; another sample is `malloc` alone, which is a
    // root and stays.
    let program = |p: &mut Profile| {
        p.function.push(Function { id: 3, name: 7, ..Function::default() });
        let inlined = vec![
            Line { function_id: 3, ..Line::default() },
            Line { function_id: 1, ..Line::default() },
        ];
        p.location.push(Location {
            id: 3,
            line: vec![Line { function_id: 3, ..Line::default() }],
            ..Location::default()
        });
        p.location.push(Location { id: 4, line: inlined, ..Location::default() });
        p.sample[0].location_id = vec![3, 1, 2];
        p.sample.push(Sample { location_id: vec![3], value: vec![1], label: Vec::new() });
        p.sample.push(Sample { location_id: vec![3, 4, 2], value: vec![1], label: Vec::new() });
    };
    let (profile, remarks) = reading(|p| {
        program(p);
        p.drop_frames = 8;
    });
    let stacks: Vec<&[u64]> = profile.sample.iter().map(|sample| &sample.location_id[..]).collect();
    assert_eq!(stacks, [&[1, 2][..], &[3], &[4, 2]]);
    assert_eq!(profile.location[3].line.len(), 1, "the inlined frame goes, its caller stays");
    assert!(
        remarks.contains("of 2 of 3 stacks are not shown")
            && remarks.contains("drop_frames `malloc|free`"),
        "{remarks}"
    );
    let (profile, remarks) = reading(|p| {
        program(p);
        (p.drop_frames, p.keep_frames) = (8, 7);
    });
    assert_eq!((profile.sample[0].location_id.len(), remarks.as_str()), (3, ""));
    let (profile, remarks) = reading(|p| {
        program(p);
        p.string_table[8] = "*(".to_owned();
        p.drop_frames = 8;
    });
    assert_eq!(profile.sample[0].location_id.len(), 3);
    assert_eq!(
        remarks,
        "drop_frames `*(` is no regular expression that can be used (repetition operator missing \
         expression): nothing is dropped"
    );
    let (_, remarks) = reading(|p| {
        program(p);
        p.string_table.push("[a".to_owned());
        (p.drop_frames, p.keep_frames) = (8, 9);
    });
    assert!(remarks.starts_with("keep_frames `[a` is no regular expression"), "{remarks}");
    assert!(!remarks.contains("drop_frames"), "{remarks}");
    let (profile, remarks) = reading(|p| {
        program(p);
        p.sample.truncate(1);
        p.string_table[8] = r"\Qmalloc\E|\Qfr\E[e]*".to_owned();
        p.drop_frames = 8;
    });
    assert_eq!(profile.sample[0].location_id, [1, 2]);
    assert_eq!(
        remarks,
        "the innermost frames of 1 of 1 stack are not shown, as the profile asks: drop_frames \
         `\\Qmalloc\\E|\\Qfr\\E[e]*`"
    );
}

#[test]
fn a_function_that_has_only_a_mangled_name_is_shown_demangled_as_pprof_shows_it() {
    let names = |name: &str, system_name: &str| {
        let (profile, _) = reading(|p| {
            p.string_table.extend([name, system_name].map(str::to_owned));
            (p.function[0].name, p.function[0].system_name) = (9, 10);
        });
        profile.string_table[usize::try_from(profile.function[0].name).unwrap()].clone()
    };
    let mangled = "_ZN3foo3barIiEEvT_";
    assert_eq!(names("", mangled), "foo::bar");
    assert_eq!(names(mangled, mangled), "foo::bar");
    assert_eq!(names("foo::bar<int>(int)", mangled), "foo::bar<int>(int)");
    assert_eq!(names(mangled, ""), mangled);
    assert_eq!(names("malloc", "malloc"), "malloc");
}

#[test]
fn what_pprof_refuses_is_refused_with_its_reason() {
    let mapping = Mapping { id: 1, ..Mapping::default() };
    assert_eq!(refusal(b""), ReadRefusal::Empty);
    assert_eq!(refusal(b"text"), ReadRefusal::Wire);
    assert_eq!(refused(|p| p.sample_type.clear()), ReadRefusal::SamplesWithoutTypes);
    assert_eq!(refused(|p| (p.sample_type, p.sample) = Default::default()), ReadRefusal::NoTypes);
    assert_eq!(
        refused(|p| p.sample[0].value.push(1)),
        ReadRefusal::Values { sample: 1, found: 2, types: 1 }
    );
    assert_eq!(
        refused(|p| p.sample[0].location_id.push(0)),
        ReadRefusal::NoLocation { sample: 1, id: 0 }
    );
    assert_eq!(
        refused(|p| p.sample[0].location_id.push(7)),
        ReadRefusal::NoLocation { sample: 1, id: 7 }
    );
    assert_eq!(
        refused(|p| p.location[1].line[0].function_id = 9),
        ReadRefusal::NoFunction { id: 2, function: 9 }
    );
    assert_eq!(
        refused(|p| p.location[1].line[0].function_id = 0),
        ReadRefusal::NoFunction { id: 2, function: 0 }
    );
    assert_eq!(
        refused(|p| p.function[1].id = 1),
        ReadRefusal::TwiceId { table: "function", id: 1 }
    );
    assert_eq!(
        refused(|p| p.mapping = vec![mapping, mapping]),
        ReadRefusal::TwiceId { table: "mapping", id: 1 }
    );
    assert_eq!(
        refused(|p| p.mapping = vec![Mapping::default()]),
        ReadRefusal::ReservedId { table: "mapping" }
    );
    assert_eq!(
        refused(|p| p.comment = vec![-1]),
        ReadRefusal::String { place: "a comment".to_owned(), found: -1, len: 9 }
    );
    let no_table = refused(|p| p.string_table.clear());
    assert!(matches!(no_table, ReadRefusal::String { found: 3, len: 0, .. }), "{no_table}");
    let two = with(|p| p.time_nanos = 5).encode_to_vec().repeat(2);
    assert_eq!(refusal(&two), ReadRefusal::Concatenated);
    assert!(ReadRefusal::Concatenated.to_string().contains("concatenated profiles detected"));
    // Without a time nobody sees that there are two, but their samples do not fit.
    assert_eq!(
        refusal(&good().encode_to_vec().repeat(2)),
        ReadRefusal::Values { sample: 1, found: 1, types: 2 }
    );
}

/// Breaks a profile.
type Change<'a> = &'a dyn Fn(&mut Profile);

#[test]
fn a_broken_string_table_is_refused_with_the_place_what_was_expected_and_what_was_found() {
    let label = |key, str, num_unit| Label { key, str, num_unit, ..Label::default() };
    let below = "expected an index below 9, the length of the string table, found 99 (pprof: ";
    let mapping = Mapping { id: 1, ..Mapping::default() };
    let said = |change: Change<'_>| refused(change).to_string();
    let cases: [(&str, Change<'_>); 11] = [
        ("the name of function 1", &|p| p.function[0].name = 99),
        ("the system name of function 2", &|p| p.function[1].system_name = 99),
        ("the file name of function 1", &|p| p.function[0].filename = 99),
        ("the file name of mapping 1", &|p| {
            p.mapping = vec![Mapping { filename: 99, ..mapping }];
        }),
        ("the build id of mapping 1", &|p| p.mapping = vec![Mapping { build_id: 99, ..mapping }]),
        ("the unit of sample type 1", &|p| p.sample_type[0].unit = 99),
        ("the name of the period", &|p| {
            p.period_type = Some(ValueType { r#type: 99, unit: 0 });
        }),
        ("the key of a label of sample 1", &|p| p.sample[0].label = vec![label(99, 1, 0)]),
        ("the text of a label of sample 1", &|p| p.sample[0].label = vec![label(1, 99, 0)]),
        ("the unit of a label of sample 1", &|p| p.sample[0].label = vec![label(1, 0, 99)]),
        ("default_sample_type", &|p| p.default_sample_type = 99),
    ];
    for (place, change) in cases {
        let said = said(change);
        assert!(said.starts_with(&format!("{place}: {below}")), "{said}");
    }
    let none = said(&|p| p.string_table.clear());
    assert!(none.contains("an index into a string table, of which the file has none, found 3"));
    let first = |text: &str| said(&|p| p.string_table[0] = text.to_owned());
    let expected = "the first string of the string table: expected the empty string, found ";
    assert_eq!(
        first("x\ny"),
        format!("{expected}`x\\u{{a}}y` (pprof: string_table[0] must be '')")
    );
    assert!(first(&"x".repeat(100_000)).len() < 300);
}

#[test]
fn messages_are_read_as_pprof_reads_them() {
    let good = good().encode_to_vec();
    // Unknown fields of each wire type, field 0 among them, and a number of ten bytes.
    let unknown =
        [0xf8, 0x07, 0x01, 0xf9, 0x07, 0, 0, 0, 0, 0, 0, 0, 0, 0x00, 0x05, 0xfd, 0x07, 0, 0, 0, 0];
    let ten = [0xf8, 0x07, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f];
    assert_eq!(read(&[&good[..], &unknown, &ten].concat()).unwrap().profile, self::good());
    for wrong in [
        // A group, a duration of eight bytes, a number of eleven bytes, a text longer than the
        // rest.
        &[0xfb, 0x07][..],
        &[0x51, 0, 0, 0, 0, 0, 0, 0, 0],
        &[0x50, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
        &[0x32, 0x7f, 0x00],
    ] {
        assert_eq!(refusal(&[&good[..], wrong].concat()), ReadRefusal::Wire, "{wrong:x?}");
    }
}
