//! A window with every kind of frame, through encoding, a file, the reports, and Go's own pprof where there is a `go`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use perfusion::aggregate::{Labels, Limits, SampleType, Window};
use perfusion::pprof::{self, About};
use perfusion::report;
use perfusion::sample::frame::{FrameKey, ImageId, Marker, ProcessId};
use perfusion::sink;
use perfusion::source::{Method, ShimEvent};
use perfusion::symbolize::{Directory, ImageFile, Symbolizer};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

const PROCESS: ProcessId = ProcessId(0);
const LIBC: ImageId = ImageId(1);
const GONE: ImageId = ImageId(2);

struct Files {
    own: File,
}

impl Directory for Files {
    fn image(&self, image: ImageId) -> Option<ImageFile<'_>> {
        match image {
            ImageId(0) => Some(ImageFile {
                path: "/opt/app/dotnet",
                file: Some(&self.own),
                build_id: Some(&[0xab, 0xcd]),
            }),
            LIBC => Some(ImageFile { path: "/usr/lib/libfoo.so (deleted)", file: None, build_id: None }),
            _ => None,
        }
    }

    fn live_pid(&self, _: ProcessId) -> Option<u32> {
        None
    }
}

const fn managed(start: u64) -> FrameKey {
    FrameKey::Managed { process: PROCESS, start, generation: 0 }
}

fn method(token: u32, name: &str, starts: &[u64]) -> ShimEvent {
    ShimEvent::Method(Box::new(Method {
        asked: starts[0],
        module_id: 7,
        token,
        dynamic: false,
        name: name.to_owned(),
        module: "App.dll".to_owned(),
        ranges: starts.iter().map(|&start| (start, 0x100)).collect(),
    }))
}

/// Main > Burn (two tiers) > native; a wait below the kernel; an allocation in Burn; a parked worker; the collector.
fn encoded() -> Vec<u8> {
    let mut symbolizer = Symbolizer::default();
    let (main, tier0, tier1, wait) = (managed(0x1000), managed(0x2000), managed(0x3000), managed(0x4000));
    for frame in [main, tier0, tier1, wait] {
        assert!(symbolizer.wants_answer(frame));
    }
    symbolizer.observe(PROCESS, &method(1, "Shop.Program.<Main>$(System.String[])", &[0x1000]));
    symbolizer.observe(PROCESS, &method(2, "Shop.Work.Burn<System.Int32>(System.Int32)", &[0x2000]));
    symbolizer.observe(PROCESS, &method(2, "Shop.Work.Burn<System.Int32>(System.Int32)", &[0x3000]));
    symbolizer.observe(PROCESS, &method(3, "Shop.Work+<Wait;For\u{7}>d__3.MoveNext()", &[0x4000]));
    let native = FrameKey::Native { image: LIBC, address: 0x1234 };
    let lost = FrameKey::Native { image: GONE, address: 0x99 };
    let kernel = FrameKey::Kernel(0xffff_ffff_8100_0000);
    let thread = |tid, name: &str| Labels {
        pid: Some(42),
        thread_id: Some(tid),
        thread_name: Some(name.into()),
        process: Some("shop".into()),
        ..Labels::default()
    };
    let mut window = Window::new(Limits::default());
    let cpu = |window: &mut Window, frames: &[FrameKey], labels: &Labels, ns: f64| {
        window.add_all(frames, labels, &[(SampleType::Samples, 1.0), (SampleType::Cpu, ns)]);
    };
    // Thirds of nanoseconds: the column must still sum to what was put in.
    cpu(&mut window, &[tier0, main], &thread(1, "main"), 10_000_000.0 / 3.0);
    cpu(&mut window, &[tier1, main], &thread(2, "main"), 10_000_000.0 / 3.0);
    cpu(&mut window, &[native, tier1, main], &thread(1, "main"), 10_000_000.0 / 3.0);
    cpu(&mut window, &[lost, FrameKey::Marker(Marker::Guessed)], &thread(1, "main"), 1e6);
    cpu(
        &mut window,
        &[native, FrameKey::Marker(Marker::GarbageCollector)],
        &thread(3, ".NET Server GC"),
        5e6,
    );
    cpu(
        &mut window,
        &[managed(0x9000), FrameKey::Stub { process: PROCESS, address: 0x7777 }, main],
        &thread(1, "main"),
        1e6,
    );
    cpu(&mut window, &[FrameKey::Unknown { process: PROCESS, address: 0x5555 }], &thread(1, "main"), 1e6);
    let waiting = Labels { wait_reason: Some("futex"), waker: Some("timer".into()), ..thread(1, "main") };
    window.add(&[kernel, native, wait, main], &waiting, SampleType::Blocked, 2e9);
    window.add(
        &[kernel, main],
        &Labels { idle: true, ..thread(4, ".NET TP Worker") },
        SampleType::Blocked,
        8e9,
    );
    let types = Labels { type_name: Some("System.Byte[]".into()), ..thread(1, "main") };
    window.add_all(
        &[tier1, main],
        &types,
        &[(SampleType::AllocObjects, 100.0), (SampleType::AllocSpace, 102_400.0)],
    );
    window.sum_into(SampleType::Wall, &[SampleType::Cpu, SampleType::Runnable, SampleType::Blocked]);
    let files = Files { own: File::open("/proc/self/exe").unwrap() };
    symbolizer.resolve(window.frames(), &files);
    let about = About {
        start: SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000),
        duration: Duration::from_secs(10),
        period_ns: 10_101_010,
        main_image: Some(ImageId(0)),
        comments: vec!["cpu: 99 Hz".to_owned(), format!("{}nothing", pprof::LOSS_PREFIX)],
    };
    pprof::encode(&window, &symbolizer, &files, &about).unwrap()
}

fn folded(profile: &pprof::proto::Profile, sample_type: &str) -> Vec<String> {
    let mut output = Vec::new();
    report::folded::write(profile, sample_type, &mut output).unwrap();
    String::from_utf8(output).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn folded_stacks_have_readable_names_and_exact_sums() {
    let profile = pprof::decode(&encoded()).unwrap();
    assert_eq!(
        folded(&profile, "cpu"),
        [
            "Garbage Collector;[libfoo.so]+0x1234 5000000",
            "Shop.Program.Main(…);Shop.Work.Burn<System.Int32>(System.Int32) 6666667",
            "Shop.Program.Main(…);Shop.Work.Burn<System.Int32>(System.Int32);[libfoo.so]+0x1234 3333333",
            "Shop.Program.Main(…);[runtime stub];[managed] 0x9000 1000000",
            "[guessed caller];[unknown image]+0x99 1000000",
            "[unknown] 0x5555 1000000",
        ]
    );
    let blocked = folded(&profile, "blocked");
    assert_eq!(blocked.len(), 2);
    let wait = "Shop.Program.Main(…);Shop.Work.Wait:For\\u{7}(…)+async;[libfoo.so]+0x1234;";
    assert!(
        blocked.iter().any(|line| line.starts_with(wait) && line.ends_with(" 2000000000")),
        "{blocked:#?}"
    );
    assert!(folded(&profile, "delay").is_empty());
}

#[test]
fn cpu_and_allocations_of_a_method_meet_on_one_location_whatever_tier_ran() {
    let profile = pprof::decode(&encoded()).unwrap();
    let name = |id: u64| {
        let location = profile.location.iter().find(|location| location.id == id).unwrap();
        let function =
            profile.function.iter().find(|function| function.id == location.line[0].function_id).unwrap();
        profile.string_table[usize::try_from(function.name).unwrap()].as_str()
    };
    let leaves = |column: SampleType| {
        let mut ids: Vec<u64> = profile
            .sample
            .iter()
            .filter(|sample| sample.value[column.index()] > 0 && name(sample.location_id[0]).contains("Burn"))
            .map(|sample| sample.location_id[0])
            .collect();
        ids.dedup();
        ids
    };
    assert_eq!(leaves(SampleType::Cpu).len(), 1);
    assert_eq!(leaves(SampleType::Cpu), leaves(SampleType::AllocSpace));
    let file = |index: i64| profile.string_table[usize::try_from(index).unwrap()].as_str();
    let main = &profile.mapping[0];
    assert_eq!((file(main.filename), file(main.build_id)), ("/opt/app/dotnet", "abcd"));
    assert!(main.memory_limit > main.memory_start);
    for mapping in &profile.mapping {
        let named = !matches!(
            file(mapping.filename),
            "/usr/lib/libfoo.so (deleted)" | "[unknown image]" | "[managed]" | "[kernel.kallsyms]"
        );
        assert!(!named || mapping.has_functions, "{}", file(mapping.filename));
        assert!(!mapping.has_line_numbers && !mapping.has_filenames);
    }
}

#[test]
fn the_table_hides_parked_threads_and_says_so() {
    let profile = pprof::decode(&encoded()).unwrap();
    let options = report::top::Options::default();
    let shown = report::top::table(&profile, "blocked", &options).unwrap();
    assert!(shown.starts_with("blocked: total 2 s in 10 s"), "{shown}");
    assert!(shown.contains("not shown: 8 s of parked threads"), "{shown}");
    // A wait belongs to the method that waits, not to the scheduler.
    let wait = shown.lines().find(|line| line.contains("+async")).unwrap();
    assert_eq!(wait.split_whitespace().take(4).collect::<Vec<_>>(), ["2", "s", "100.0%", "2"], "{shown}");
    assert!(!shown.contains('\x1b'), "{shown}");
    let narrow = report::top::Options { width: Some(60), ..options };
    let narrow = report::top::table(&profile, "cpu", &narrow).unwrap();
    assert!(narrow.lines().skip(1).all(|line| line.chars().count() <= 60), "{narrow}");
    let other = report::top::Options { pid: Some(1), ..options };
    assert!(report::top::table(&profile, "cpu", &other).unwrap().starts_with("cpu: total 0 in"));
    let error = report::top::table(&profile, "nonsense", &options).unwrap_err().to_string();
    assert!(error.contains("alloc_space"), "{error}");
}

#[test]
fn go_s_pprof_reads_every_sample_type() {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("synthetic.pb.gz");
    sink::file::write(&path, &encoded()).unwrap();
    assert!(report::load(Path::new(&path)).is_ok());
    if Command::new("go").arg("version").output().is_err() {
        eprintln!("left out: no `go` on PATH");
        return;
    }
    for sample_type in SampleType::ALL {
        let index = format!("-sample_index={}", sample_type.name());
        let output = Command::new("go").args(["tool", "pprof", "-top", &index]).arg(&path).output().unwrap();
        let (stdout, stderr) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{sample_type:?}: {stderr}");
        assert!(stdout.contains(&format!("Type: {}", sample_type.name())), "{stdout}");
        if sample_type == SampleType::Cpu {
            assert!(
                stdout.contains("Shop.Work.Burn<System.Int32>(System.Int32)")
                    && stdout.contains("Garbage Collector"),
                "{stdout}"
            );
        }
    }
}

#[test]
fn the_flame_graph_is_one_file_with_every_column() {
    let profile = pprof::decode(&encoded()).unwrap();
    let page = report::flame::page(&profile, "shop, pid 42").unwrap();
    for sample_type in SampleType::ALL {
        assert!(page.contains(&format!("\"name\":\"{}\"", sample_type.name())));
    }
    assert!(page.contains("\"loss\":\"nothing\""));
    sink::file::write(&PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("flame.html"), page.as_bytes())
        .unwrap();
}

#[test]
fn any_cut_of_a_file_is_refused_without_panic() {
    let bytes = encoded();
    for cut in 0..bytes.len() {
        assert!(pprof::decode(&bytes[..cut]).is_err() || cut == 0, "cut at {cut}");
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(500))]
    /// A scribbled-on message is refused or shown, but no report panics.
    #[test]
    fn reports_survive_any_profile(changes in proptest::collection::vec((proptest::prelude::any::<proptest::sample::Index>(), proptest::prelude::any::<u8>()), 1..4)) {
        use prost::Message;
        use std::sync::OnceLock;
        static PLAIN: OnceLock<Vec<u8>> = OnceLock::new();
        let plain = PLAIN.get_or_init(|| pprof::decode(&encoded()).unwrap().encode_to_vec());
        let mut bytes = plain.clone();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(profile) = pprof::decode(&bytes) {
            let stacks = report::stacks::Stacks::new(&profile);
            for (name, _) in stacks.sample_types() {
                report::top::table(&profile, name, &report::top::Options::default()).unwrap();
                report::folded::write(&profile, name, &mut Vec::new()).unwrap();
            }
            report::flame::page(&profile, "scribbled").unwrap();
        }
    }
}
