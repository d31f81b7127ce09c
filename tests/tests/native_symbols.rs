//! Names of native code and of NativeAOT's methods: from debug files, from the program itself, and
//! from symbol servers.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;
use system_tests::app::copy_program;
use system_tests::environment::{Need, RECORD, begin_beside, published};
use system_tests::perfusion::{self, SLACK, Scratch};
use system_tests::{Profile, Recording};

const NEEDS: [Need; 4] = [Need::Root, Need::Btf, Need::Perfusion, Need::Published];
/// How long the program works, on one thread.
const SECONDS: &str = "4";

/// A recorded run of a published program, and what it says of itself.
struct Run {
    profile: Profile,
    truth: Value,
    stderr: String,
}

fn record(program: &Path, scratch: &Scratch, arguments: &[&str]) -> Run {
    let file = scratch.path("aot.pb.gz");
    let mut command = perfusion::command(["record", "-F", "499", "-o"]);
    command.arg(&file).args(arguments).arg("--").arg(program).args([SECONDS, "1"]);
    // Whatever the machine's environment says.
    command.env_remove("DEBUGINFOD_URLS");
    let outcome = Recording::spawn(&mut command).unwrap().finish_well(SLACK).unwrap();
    let last = outcome.stdout.lines().last().unwrap_or_default();
    let truth = serde_json::from_str(last).unwrap();
    Run { profile: Profile::read(&file).unwrap(), truth, stderr: outcome.stderr }
}

/// What part of the frames of `Work`, weighed by CPU time, has a name.
fn named(profile: &Profile) -> f64 {
    let (mut all, mut named) = (0.0, 0.0);
    for sample in &profile.samples {
        let cpu = profile.value(sample, "cpu") as f64;
        for frame in sample.stack.iter().filter(|frame| frame.mapping.ends_with("/Work")) {
            all += cpu;
            named += if frame.function.starts_with("[Work]") { 0.0 } else { cpu };
        }
    }
    assert!(all > 0.0, "{}", profile.describe("cpu", |_| true));
    named / all
}

/// CPU time below these methods is what the program has measured itself.
fn assert_true(run: &Run, methods: &[(&str, &str)]) {
    for (method, key) in methods {
        let expected = run.truth[key].as_f64().unwrap();
        let sum = |column| run.profile.sum(column, |sample| sample.has(method)) as f64;
        let (found, samples) = (sum("cpu") / 1e6, sum("samples"));
        // Samples say how much of the exact CPU time is this method's: four standard deviations,
        // and 5 % for what is outside the program's own clock readings.
        let tolerance = 0.05 + 4.0 / samples.max(1.0).sqrt();
        assert!(
            (found - expected).abs() < tolerance * expected,
            "{method}: {found:.0} ms of {expected:.0}:\n{}",
            run.profile.describe("cpu", |_| true)
        );
    }
}

fn has_functions(profile: &Profile, names: &[&str]) {
    for name in names {
        assert!(
            profile.functions().contains(name),
            "no {name}:\n{}",
            profile.describe("cpu", |_| true)
        );
    }
}

#[test]
fn native_aot_methods_have_csharp_names_with_a_debug_file() {
    let name = "native_symbols::native_aot_with_debug_file";
    let Some(_turn) = begin_beside(name, &NEEDS) else { return };
    let scratch = Scratch::new().unwrap();
    let run = record(&published("aot").unwrap(), &scratch, &[]);
    let share = named(&run.profile);
    assert!(share > 0.99, "{share}: {}", run.profile.describe("cpu", |s| s.has("[Work]")));
    assert!(run.profile.counter("debug_files") >= Some(1));
    assert_true(
        &run,
        &[
            ("Shop.ParseOrder(int)", "parse_ms"),
            ("Shop.PriceOrder(Order)", "price_ms"),
            ("Shop.HashOrder<", "hash_ms"),
        ],
    );
    // Both instantiations; what the compiler made of an async method; the runtime's own code.
    has_functions(
        &run.profile,
        &[
            "Shop.HashOrder<int>(int, Order)",
            "Shop.HashOrder<__Canon>(__Canon, Order)",
            "Shop.SaveOrderAsync(Order)",
            "Shop.Worker(object)",
            "Shop.Spin(long)",
        ],
    );
}

#[test]
fn native_aot_methods_have_csharp_names_without_any_debug_file() {
    let name = "native_symbols::native_aot_without_debug_file";
    let Some(_turn) = begin_beside(name, &NEEDS) else { return };
    let scratch = Scratch::new().unwrap();
    let alone = scratch.path("Work");
    copy_program(&published("aot").unwrap(), &alone).unwrap();
    let run = record(&alone, &scratch, &[]);
    assert_true(
        &run,
        &[("Shop.ParseOrder(int)", "parse_ms"), ("Shop.PriceOrder(Order)", "price_ms")],
    );
    has_functions(&run.profile, &["Shop.Worker(object)", "Shop.HashOrder<T>(T, Order)"]);
    // The collector and the platform's layer are native code, of which nothing is exported: 4 % of
    // this program's frames.
    let share = named(&run.profile);
    assert!(share > 0.9, "{share}: {}", run.profile.describe("cpu", |s| s.has("[Work]")));
}

#[test]
fn native_aot_with_its_symbols_in_the_file_is_named() {
    let name = "native_symbols::native_aot_with_symbols";
    let Some(_turn) = begin_beside(name, &NEEDS) else { return };
    let scratch = Scratch::new().unwrap();
    let run = record(&published("aotes").unwrap(), &scratch, &[]);
    let share = named(&run.profile);
    assert!(share > 0.99, "{share}: {}", run.profile.describe("cpu", |s| s.has("[Work]")));
    assert_true(&run, &[("Shop.ParseOrder(int)", "parse_ms")]);
}

/// A symbol server that has one file at one path.
fn serve(path: String, file: PathBuf) -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let asked = Arc::<Mutex<Vec<String>>>::default();
    let paths = Arc::clone(&asked);
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let first = lines.next().and_then(Result::ok).unwrap_or_default();
            while lines.next().is_some_and(|line| line.is_ok_and(|line| !line.is_empty())) {}
            let wanted = first.split(' ').nth(1).unwrap_or_default().to_owned();
            let body = if wanted == path { fs::read(&file).unwrap() } else { Vec::new() };
            let status = if wanted == path { "200 OK" } else { "404 Not Found" };
            paths.lock().unwrap().push(wanted);
            let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", body.len());
            // A client that has gone is no failure of the server.
            stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body)).ok();
        }
    });
    (url, asked)
}

/// The build id of a file, as `symbols check` has it.
fn build_id(program: &Path) -> String {
    let mut command = perfusion::command(["symbols", "check"]);
    let outcome = perfusion::run(command.arg(program), Duration::from_secs(60)).unwrap();
    let after = outcome.stdout.split_once(": ").unwrap().1;
    after.split(';').next().unwrap().to_owned()
}

#[test]
fn symbols_come_from_a_server_once_and_from_a_directory_without_a_network() {
    let name = "native_symbols::symbols_come_from_a_server";
    let Some(_turn) = begin_beside(name, &NEEDS) else { return };
    let scratch = Scratch::new().unwrap();
    let (program, debug) =
        (published("aot").unwrap(), published("aot").unwrap().with_file_name("Work.dbg"));
    let alone = scratch.path("Work");
    copy_program(&program, &alone).unwrap();
    let id = build_id(&alone);
    let (url, asked) = serve(format!("/buildid/{id}/debuginfo"), debug);
    let cache = scratch.path("cache").to_str().unwrap().to_owned();
    let from_server = ["--symbol-server", &url, "--symbol-cache", &cache];
    let run = record(&alone, &scratch, &from_server);
    assert!(run.stderr.contains("symbols: 1 fetched"), "{}", run.stderr);
    let share = named(&run.profile);
    assert!(share > 0.99, "{share}: {}", run.profile.describe("cpu", |s| s.has("[Work]")));
    has_functions(&run.profile, &["Shop.HashOrder<int>(int, Order)"]);
    let of_file = |paths: &[String]| paths.iter().filter(|path| path.contains(&id)).count();
    assert_eq!(of_file(&asked.lock().unwrap()), 1);
    // It was kept: nobody is asked for it again.
    let run = record(&alone, &scratch, &from_server);
    assert!(named(&run.profile) > 0.99);
    assert_eq!(of_file(&asked.lock().unwrap()), 1);

    // A host with a network fetches what a profile lacks, for one without.
    let (bare, into) = (record(&alone, &scratch, &["--no-symbol-server"]), scratch.path("fetched"));
    assert!(named(&bare.profile) < 0.99, "the cache is not that of this user");
    let mut command = perfusion::command(["symbols", "fetch", "--symbol-server", &url, "--into"]);
    command.arg(&into).arg(scratch.path("aot.pb.gz"));
    let outcome = perfusion::run(&mut command, SLACK).unwrap();
    assert!(outcome.stdout.contains(&format!("{}/.build-id/", into.display())), "{outcome:?}");
    let directory = ["--no-symbol-server", "--symbol-directory", into.to_str().unwrap()];
    let run = record(&alone, &scratch, &directory);
    assert!(named(&run.profile) > 0.99, "{}", run.stderr);
}

#[test]
fn symbols_check_tells_what_has_none() {
    let Some(_turn) = begin_beside("native_symbols::check", &[RECORD, &[Need::C]].concat()) else {
        return;
    };
    let scratch = Scratch::new().unwrap();
    let of = |name: &str| scratch.path(name).to_str().unwrap().to_owned();
    fs::write(of("a.c"), "int main(void) { return 0; }").unwrap();
    let run = |program: &str, arguments: &[&str]| {
        let status = std::process::Command::new(program).args(arguments).status().unwrap();
        assert!(status.success(), "{program} {arguments:?}");
    };
    run("gcc", &["-Wl,--build-id", "-o", &of("whole"), &of("a.c")]);
    run("objcopy", &["--only-keep-debug", &of("whole"), &of("stripped.debug")]);
    run("strip", &["-o", &of("stripped"), &of("whole")]);
    let debug = of("stripped.debug");
    run("objcopy", &[&format!("--add-gnu-debuglink={debug}"), &of("stripped")]);
    run("strip", &["-o", &of("bare"), &of("whole")]);
    let check = |files: &[&str]| {
        let mut command = perfusion::command(["symbols", "check"]);
        perfusion::run(command.args(files.iter().map(|file| of(file))), SLACK).unwrap()
    };
    let outcome = check(&["whole", "stripped"]);
    assert_eq!(outcome.code(), 0, "{outcome:?}");
    assert!(outcome.stdout.contains("its own symbol table"), "{}", outcome.stdout);
    assert!(outcome.stdout.contains(&format!("debug file {debug}")), "{}", outcome.stdout);
    let outcome = check(&["bare"]);
    assert_eq!(outcome.code(), 1, "{outcome:?}");
    assert!(outcome.stdout.contains("no symbols but those it exports"), "{}", outcome.stdout);
    let outcome = check(&["a.c"]);
    assert!(outcome.code() == 1 && outcome.stdout.is_empty(), "{outcome:?}");
}
