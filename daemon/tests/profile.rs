//! A window with every kind of frame, through encoding, a file, the reports, and Go's own pprof
//! where there is a `go`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use perfusion_aggregate::{Window, WindowLimits};
use perfusion_host::process::guarded_io::ForeignFile;
use perfusion_model::event::{MethodBody, ShimEvent};
use perfusion_model::frame::{FrameKey, ImageId, Marker, ProcessId};
use perfusion_model::labels::{Labels, SampleType};
use perfusion_pprof::{self, ProfileInfo};
use perfusion_report::stacks::{LabelFilter, ProfileView};
use perfusion_report::top::TableOptions;
use perfusion_symbolize::{ImageFile, ImageResolver, Symbolizer};
use proptest::collection::vec;
use proptest::prelude::any;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

const PROCESS: ProcessId = ProcessId(0);
const LIBC: ImageId = ImageId(1);
const GONE: ImageId = ImageId(2);

struct Files {
    own: ForeignFile,
}

impl ImageResolver for Files {
    fn image(&self, image: ImageId) -> Option<ImageFile<'_>> {
        match image {
            ImageId(0) => Some(ImageFile {
                path: "/opt/app/dotnet",
                file: Some(&self.own),
                build_id: Some(&[0xab, 0xcd]),
            }),
            LIBC => {
                Some(ImageFile { path: "/usr/lib/libfoo.so (deleted)", file: None, build_id: None })
            }
            _ => None,
        }
    }

    fn live_pid(&self, _: ProcessId) -> Option<u32> {
        None
    }
}

const fn managed(start: u64) -> FrameKey {
    FrameKey::Managed { process: PROCESS, start, generation: 0, offset: None }
}

fn method(token: u32, name: &str, starts: &[u64]) -> ShimEvent {
    ShimEvent::Method(Box::new(MethodBody {
        asked: starts[0],
        module_id: 7,
        token,
        dynamic: false,
        name: name.to_owned(),
        module: "App.dll".to_owned(),
        ranges: starts.iter().map(|&start| (start, 0x100)).collect(),
        il_map: None,
    }))
}

/// Main > Burn (two tiers) > native; a wait below the kernel; an allocation in Burn; a parked
/// worker; the collector.
fn encoded() -> Vec<u8> {
    let mut symbolizer = Symbolizer::default();
    let (main, tier0, tier1, wait) =
        (managed(0x1000), managed(0x2000), managed(0x3000), managed(0x4000));
    for frame in [main, tier0, tier1, wait] {
        assert!(symbolizer.wants_answer(frame, true));
    }
    symbolizer.observe(PROCESS, &method(1, "Shop.Program.<Main>$(System.String[])", &[0x1000]));
    symbolizer
        .observe(PROCESS, &method(2, "Shop.Work.Burn<System.Int32>(System.Int32)", &[0x2000]));
    symbolizer
        .observe(PROCESS, &method(2, "Shop.Work.Burn<System.Int32>(System.Int32)", &[0x3000]));
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
    let mut window = Window::new(WindowLimits::default());
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
    cpu(
        &mut window,
        &[FrameKey::Unknown { process: PROCESS, address: 0x5555 }],
        &thread(1, "main"),
        1e6,
    );
    let waiting = Labels {
        wait_reason: Some("futex"),
        waker: Some("pool 1 42/9".into()),
        waker_name: Some("pool 1".into()),
        ..thread(1, "main")
    };
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
    window
        .sum_into(SampleType::Wall, &[SampleType::Cpu, SampleType::Runnable, SampleType::Blocked]);
    let files = Files { own: ForeignFile::own(File::open("/proc/self/exe").unwrap()) };
    symbolizer.resolve(window.frames(), &files);
    let about = ProfileInfo {
        start: SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000),
        duration: Duration::from_secs(10),
        period_ns: 10_101_010,
        main_image: Some(ImageId(0)),
        comments: vec!["cpu: 99 Hz".to_owned(), format!("{}nothing", perfusion_pprof::LOSS_PREFIX)],
    };
    perfusion_pprof::encode(&window, &symbolizer, &files, &about).unwrap()
}

fn folded(
    profile: &perfusion_pprof::proto::Profile,
    sample_type: &str,
    view: &ProfileView,
) -> (Vec<String>, i128) {
    let mut output = Vec::new();
    let left_out =
        perfusion_report::folded::write(profile, sample_type, view, &mut output).unwrap();
    (String::from_utf8(output).unwrap().lines().map(str::to_owned).collect(), left_out.parked)
}

#[test]
fn folded_stacks_have_readable_names_and_exact_sums() {
    let profile = perfusion_pprof::decode(&encoded()).unwrap();
    assert_eq!(
        folded(&profile, "cpu", &ProfileView::default()).0,
        [
            "Garbage Collector;[libfoo.so]+0x1234 5000000",
            "Shop.Program.Main(…);Shop.Work.Burn<System.Int32>(System.Int32) 6666667",
            "Shop.Program.Main(…);Shop.Work.Burn<System.Int32>(System.Int32);[libfoo.so]+0x1234 \
             3333333",
            "Shop.Program.Main(…);[runtime stub];[managed]\\u{20}0x9000 1000000",
            "[guessed caller];[unknown image]+0x99 1000000",
            "[unknown]\\u{20}0x5555 1000000",
        ]
    );
    let (all, none) =
        folded(&profile, "blocked", &ProfileView { idle: true, ..ProfileView::default() });
    assert_eq!((all.len(), none), (2, 0));
    // As in the table and the flame graph, parked threads are shown on request only.
    let (blocked, parked) = folded(&profile, "blocked", &ProfileView::default());
    assert_eq!((blocked.len(), parked), (1, 8_000_000_000));
    let wait = "Shop.Program.Main(…);Shop.Work.Wait\\u{3b}For\\u{7}(…)+async;[libfoo.so]+0x1234;";
    assert!(
        blocked.iter().any(|line| line.starts_with(wait) && line.ends_with(" 2000000000")),
        "{blocked:#?}"
    );
    assert!(folded(&profile, "delay", &ProfileView::default()).0.is_empty());
    let grouped = |labels: &[&str]| {
        let by = labels.iter().map(|label| (*label).to_owned()).collect();
        folded(&profile, "blocked", &ProfileView { idle: true, by, ..ProfileView::default() }).0
    };
    let by = grouped(&["thread"]);
    assert!(
        by[0].starts_with(".NET TP Worker\\u{20}4;Shop.Program.Main")
            && by[1].starts_with("main\\u{20}1;"),
        "{by:#?}"
    );
    // Of several the first is the outermost.
    let by = grouped(&["waker_name", "thread_name"]);
    assert!(
        by[0].starts_with("(none);.NET TP Worker;Shop.Program.Main")
            && by[1].starts_with("pool\\u{20}1;main;Shop.Program.Main"),
        "{by:#?}"
    );
}

#[test]
fn cpu_and_allocations_of_a_method_meet_on_one_location_whatever_tier_ran() {
    let profile = perfusion_pprof::decode(&encoded()).unwrap();
    let name = |id: u64| {
        let location = profile.location.iter().find(|location| location.id == id).unwrap();
        let function = profile
            .function
            .iter()
            .find(|function| function.id == location.line[0].function_id)
            .unwrap();
        profile.string_table[usize::try_from(function.name).unwrap()].as_str()
    };
    let leaves = |column: SampleType| {
        let mut ids: Vec<u64> = profile
            .sample
            .iter()
            .filter(|sample| {
                sample.value[column.index()] > 0 && name(sample.location_id[0]).contains("Burn")
            })
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
    let profile = perfusion_pprof::decode(&encoded()).unwrap();
    let options = perfusion_report::top::TableOptions::default();
    let shown = perfusion_report::top::table(&profile, "blocked", &options).unwrap();
    assert!(shown.starts_with("blocked: total 2 s in 10 s"), "{shown}");
    assert!(shown.contains("not shown: 8 s of parked threads"), "{shown}");
    // A wait belongs to the method that waits, not to the scheduler.
    let wait = shown.lines().find(|line| line.contains("+async")).unwrap();
    assert_eq!(
        wait.split_whitespace().take(4).collect::<Vec<_>>(),
        ["2", "s", "100.0%", "2"],
        "{shown}"
    );
    assert!(!shown.contains('\x1b'), "{shown}");
    let narrow = perfusion_report::top::TableOptions { width: Some(60), ..options.clone() };
    let narrow = perfusion_report::top::table(&profile, "cpu", &narrow).unwrap();
    assert!(narrow.lines().skip(1).all(|line| line.chars().count() <= 60), "{narrow}");
    let only = |label: &str, value: &str| {
        let only = vec![LabelFilter { label: label.to_owned(), value: value.to_owned() }];
        perfusion_report::top::TableOptions {
            view: ProfileView { only, ..ProfileView::default() },
            ..options.clone()
        }
    };
    let error =
        perfusion_report::top::table(&profile, "cpu", &only("pid", "1")).unwrap_err().to_string();
    assert!(error.contains("pid=1: no sample") && error.contains("there are 42"), "{error}");
    let shown = perfusion_report::top::table(&profile, "delay", &only("pid", "42")).unwrap();
    assert!(
        shown.starts_with("delay: total 0") && shown.contains("nothing was counted"),
        "{shown}"
    );
    for (label, value) in [("thread", ".NET Server GC"), ("thread", "3"), ("thread_id", "3")] {
        let shown = perfusion_report::top::table(&profile, "cpu", &only(label, value)).unwrap();
        assert!(shown.starts_with("cpu: total 5 ms in"), "{label}: {shown}");
    }
    let delay = perfusion_report::top::table(&profile, "delay", &options).unwrap();
    assert!(delay.contains("nothing was counted"), "{delay}");
    // Why, where the recording knows; a table that is not empty does without.
    let mut limited = profile.clone();
    limited.string_table.push(format!("{}diagnostics are off", perfusion_pprof::WITHOUT_SHIM));
    limited.comment.push(i64::try_from(limited.string_table.len() - 1).unwrap());
    let delay = perfusion_report::top::table(&limited, "delay", &options).unwrap();
    assert!(
        delay.contains("nothing was counted") && delay.contains("diagnostics are off"),
        "{delay}"
    );
    let blocked = perfusion_report::top::table(&limited, "blocked", &options).unwrap();
    assert!(!blocked.contains("diagnostics are off"), "{blocked}");
    let error = perfusion_report::top::table(&profile, "cpu", &only("colour", "red"))
        .unwrap_err()
        .to_string();
    assert!(error.contains("`colour`") && error.contains("wait_reason"), "{error}");
    let error =
        perfusion_report::top::table(&profile, "nonsense", &options).unwrap_err().to_string();
    assert!(error.contains("alloc_space"), "{error}");
}

/// Numbers of the row of a function: value and percentage, twice.
fn row(table: &str, function: &str) -> String {
    let line = table.lines().find(|line| line.contains(function)).unwrap_or(table);
    line.split(function).next().unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A user's method waits and allocates in helpers of the framework, and the runtime below them.
fn through_the_framework() -> perfusion_pprof::proto::Profile {
    let mut symbolizer = Symbolizer::default();
    let code = [0x1000, 0x2000, 0x3000, 0x4000].map(managed);
    let [post, enter, stub, pool] = code;
    for frame in code {
        assert!(symbolizer.wants_answer(frame, true));
    }
    for (at, name, module) in [
        (0x1000, "Shop.Ledger.Post()", "Shop.dll"),
        (
            0x2000,
            "System.Threading.Monitor.Enter_Slowpath(System.Object)",
            "System.Private.CoreLib.dll",
        ),
        (0x3000, "IL_STUB_PInvoke(System.IntPtr)", "Shop.dll"),
        (0x4000, "System.Threading.ThreadPoolWorkQueue.Dispatch()", "System.Private.CoreLib.dll"),
    ] {
        let mut event = method(at as u32, name, &[at]);
        if let ShimEvent::Method(method) = &mut event {
            method.module = module.to_owned();
        }
        symbolizer.observe(PROCESS, &event);
    }
    let (native, kernel) =
        (FrameKey::Native { image: LIBC, address: 0x12 }, FrameKey::Kernel(0xffff_ffff_8100_0000));
    let mut window = Window::new(WindowLimits::default());
    let waits = |reason| Labels { pid: Some(42), wait_reason: Some(reason), ..Labels::default() };
    window.add(&[kernel, native, enter, post], &waits("futex"), SampleType::Blocked, 4e9);
    window.add(&[kernel, native, stub, enter, post], &waits("futex"), SampleType::Blocked, 2e9);
    window.add(&[kernel, native, pool], &waits("read:pipe"), SampleType::Blocked, 1e9);
    window.add(&[enter, post], &Labels::default(), SampleType::Cpu, 1e9);
    let bytes = Labels { type_name: Some("System.Byte[]".into()), ..Labels::default() };
    window.add(&[enter, post], &bytes, SampleType::AllocSpace, 1024.0);
    let files = Files { own: ForeignFile::own(File::open("/proc/self/exe").unwrap()) };
    symbolizer.resolve(window.frames(), &files);
    let about = ProfileInfo {
        start: SystemTime::UNIX_EPOCH,
        duration: Duration::from_secs(10),
        period_ns: 10_101_010,
        main_image: None,
        comments: vec![
            format!("{}3 instead of 99", perfusion_pprof::RATES_LOWERED_PREFIX),
            format!("{}nothing", perfusion_pprof::LOSS_PREFIX),
        ],
    };
    perfusion_pprof::decode(&perfusion_pprof::encode(&window, &symbolizer, &files, &about).unwrap())
        .unwrap()
}

#[test]
fn waits_and_allocations_belong_to_the_user_s_method_and_cpu_time_to_who_used_it() {
    let profile = through_the_framework();
    let options = perfusion_report::top::TableOptions::default();
    let table =
        |sample_type| perfusion_report::top::table(&profile, sample_type, &options).unwrap();
    // What a sample is worth depends on how often they were taken.
    let tells_rates = |sample_type| table(sample_type).contains("rates lowered, 3 instead of 99");
    assert!(tells_rates("cpu") && !tells_rates("blocked"));
    let blocked = table("blocked");
    assert_eq!(row(&blocked, "Shop.Ledger.Post"), "6 s 85.7% 6 s 85.7%", "{blocked}");
    assert_eq!(row(&blocked, "System.Threading.Monitor.Enter"), "0 0.0% 6 s 85.7%", "{blocked}");
    // Where no method is the user's, it is the framework's.
    assert_eq!(
        row(&blocked, "System.Threading.ThreadPoolWorkQueue"),
        "1 s 14.3% 1 s 14.3%",
        "{blocked}"
    );
    assert!(blocked.contains("outside the framework"), "{blocked}");
    assert_eq!(row(&table("alloc_space"), "Shop.Ledger.Post"), "1 KiB 100.0% 1 KiB 100.0%");
    assert_eq!(row(&table("cpu"), "System.Threading.Monitor.Enter"), "1 s 100.0% 1 s 100.0%");
    assert!(!table("cpu").contains("outside the framework"));
}

#[test]
fn tables_sort_by_cum_and_group_by_a_label() {
    let profile = through_the_framework();
    let options = perfusion_report::top::TableOptions {
        cumulative: true,
        limit: 1,
        ..perfusion_report::top::TableOptions::default()
    };
    let first = perfusion_report::top::table(&profile, "blocked", &options).unwrap();
    // All waits end in the kernel, which has nothing of its own.
    assert!(
        first.lines().nth(2).unwrap().starts_with("         0   0.0%        7 s 100.0%  "),
        "{first}"
    );
    let options = perfusion_report::top::TableOptions::default();
    let group = |sample_type, by: &str| {
        perfusion_report::groups::table(&profile, sample_type, &[by.to_owned()], &options)
    };
    let by = group("blocked", "wait_reason").unwrap();
    assert!(by.starts_with("blocked by wait_reason: total 7 s in 10 s, 2 of 2 values"), "{by}");
    assert_eq!(
        (row(&by, "futex").as_str(), row(&by, "read:pipe").as_str()),
        ("6 s 85.7%", "1 s 14.3%")
    );
    assert_eq!(row(&group("alloc_space", "type").unwrap(), "System.Byte[]"), "1 KiB 100.0%");
    assert_eq!(row(&group("cpu", "process").unwrap(), "(none)"), "1 s 100.0%");
    assert_eq!(row(&group("blocked", "process").unwrap(), "process 42"), "7 s 100.0%");
    assert!(group("blocked", "nonsense").is_err());
    // Any profile with a label of one process has a branch for each of its values.
    let view = ProfileView { by: vec!["wait_reason".to_owned()], ..ProfileView::default() };
    let page = perfusion_report::flame::page(&profile, "shop", Some("blocked"), &view).unwrap();
    assert!(page.contains("[\"read:pipe\",\"\",3]") && page.contains("\"default\":\"blocked\""));
    assert!(perfusion_report::flame::page(&profile, "shop", Some("colour"), &view).is_err());
}

#[test]
fn several_labels_have_a_row_for_each_combination() {
    let profile = perfusion_pprof::decode(&encoded()).unwrap();
    let options = perfusion_report::top::TableOptions {
        view: ProfileView { idle: true, ..ProfileView::default() },
        ..perfusion_report::top::TableOptions::default()
    };
    let table = |by: &[&str]| {
        let by: Vec<String> = by.iter().map(|label| (*label).to_owned()).collect();
        perfusion_report::groups::table(&profile, "blocked", &by, &options)
            .map_err(|error| error.to_string())
    };
    let shown = table(&["thread_name", "waker_name", "wait_reason"]).unwrap();
    assert_eq!(
        shown.lines().collect::<Vec<_>>(),
        [
            "blocked by thread_name, waker_name, wait_reason: total 10 s in 10 s, 2 of 2 values",
            "                   thread_name     waker_name  wait_reason",
            "       8 s  80.0%  .NET TP Worker  (none)      (none)",
            "       2 s  20.0%  main            pool 1      futex",
        ]
    );
    // One label is as before.
    assert!(table(&["waker"]).unwrap().ends_with("       2 s  20.0%  pool 1 42/9\n"));
    let error = table(&["thread_name", "wakers"]).unwrap_err();
    assert!(error.contains("`wakers`") && error.contains("waker_name"), "{error}");
    let cpu = |labels: &[&str]| {
        let by = labels.iter().map(|label| (*label).to_owned()).collect();
        let view = ProfileView { by, ..ProfileView::default() };
        perfusion_report::flame::page(&profile, "shop", None, &view).unwrap()
    };
    // Nodes are numbered parents first: all, then the thread's name, then its id.
    let page = cpu(&["thread_name", "thread_id"]);
    assert!(
        page.contains("\"parents\":[0,0,1,2"),
        "{}",
        &page[page.find("\"parents\"").unwrap()..][..60]
    );
}

#[test]
fn an_empty_file_is_called_empty() {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("empty.pb.gz");
    std::fs::write(&path, "").unwrap();
    let error = perfusion_report::load(&path).unwrap_err().to_string();
    assert!(error.contains("empty.pb.gz") && error.contains("is empty"), "{error}");
    let error = perfusion_report::load(path.parent().unwrap()).unwrap_err().to_string();
    assert!(error.contains("found a directory"), "{error}");
}

#[test]
fn go_s_pprof_reads_every_sample_type() {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("synthetic.pb.gz");
    perfusion_export::file::write(&path, &encoded()).unwrap();
    assert!(perfusion_report::load(Path::new(&path)).is_ok());
    if Command::new("go").arg("version").output().is_err() {
        eprintln!("left out: no `go` on PATH");
        return;
    }
    for sample_type in SampleType::ALL {
        let index = format!("-sample_index={}", sample_type.name());
        let output =
            Command::new("go").args(["tool", "pprof", "-top", &index]).arg(&path).output().unwrap();
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
    let profile = perfusion_pprof::decode(&encoded()).unwrap();
    let page =
        perfusion_report::flame::page(&profile, "shop, pid 42", None, &ProfileView::default())
            .unwrap();
    for sample_type in SampleType::ALL {
        assert!(page.contains(&format!("\"name\":\"{}\"", sample_type.name())));
    }
    assert!(page.contains("\"loss\":\"nothing\""));
    perfusion_export::file::write(
        &PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("flame.html"),
        page.as_bytes(),
    )
    .unwrap();
}

#[test]
fn any_cut_of_a_file_is_refused_without_panic() {
    let bytes = encoded();
    for cut in 0..bytes.len() {
        assert!(perfusion_pprof::decode(&bytes[..cut]).is_err() || cut == 0, "cut at {cut}");
    }
}

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(500))]
    /// A scribbled-on message is refused or shown, but no report panics.
    #[test]
    fn reports_survive_any_profile(
        changes in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
    ) {
        use prost::Message;
        use std::sync::OnceLock;
        static PLAIN: OnceLock<Vec<u8>> = OnceLock::new();
        let plain = PLAIN
            .get_or_init(|| perfusion_pprof::decode(&encoded()).unwrap().encode_to_vec());
        let mut bytes = plain.clone();
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(profile) = perfusion_pprof::decode(&bytes) {
            let stacks = perfusion_report::stacks::ProfileStacks::new(&profile);
            for (name, _) in stacks.sample_types() {
                perfusion_report::top::table(&profile, name, &TableOptions::default()).unwrap();
                let view = ProfileView::default();
                perfusion_report::folded::write(&profile, name, &view, &mut Vec::new()).unwrap();
                // The label may be scribbled on, too.
                let by = ["process", "thread"].map(str::to_owned);
                let options = TableOptions::default();
                perfusion_report::groups::table(&profile, name, &by, &options).ok();
            }
            let view = ProfileView::default();
            perfusion_report::flame::page(&profile, "scribbled", None, &view).unwrap();
        }
    }
}
