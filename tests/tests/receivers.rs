//! The daemon on a node of two hundred services, one of them with stacks that are long beyond reason,
//! and receivers that misbehave, in a cgroup of the chart's limit. It lives, what can arrive arrives
//! once, and it ends in time.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use flate2::read::GzDecoder;
use perfusion_export::otlp::proto::ExportProfilesServiceRequest;
use perfusion_export::otlp::proto::any_value::Value;
use perfusion_export::pyroscope::PushRequest;
use prost::Message as _;
use rustix::process::Signal;
use system_tests::app::{App, Workload};
use system_tests::cgroup::Group;
use system_tests::environment::{Need, RECORD, begin, long_form};
use system_tests::perfusion::{Recording, Scratch, command};
use system_tests::wait::{let_pass, wait_until};

use crate::node::{DEADLINE, free_port, value};

/// The chart's `resources.limits.memory`.
const CHART_LIMIT: u64 = 512 << 20;
/// `limits.memory`, MiB.
const MEMORY: u64 = 256;
/// A daemon that is told to end has ended by then.
const END: Duration = Duration::from_secs(3);

/// CPU time by service, as the requests have it that a receiver took.
type Cpu = BTreeMap<String, i64>;

/// What a receiver does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    /// It takes everything.
    Takes,
    /// It resets the connection in the middle of what is longer than this.
    Resets(usize),
    /// It answers a status to what is longer than this.
    Answers(u16, usize),
    /// It answers 413 to the service with this name.
    Refuses(&'static str),
    /// It takes a connection and says nothing.
    IsSilent,
}

struct Receiver {
    port: u16,
    taken: Arc<Mutex<Cpu>>,
}

impl Receiver {
    fn start(does: Does, is_pyroscope: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let receiver = Self { port: listener.local_addr().unwrap().port(), taken: Arc::default() };
        let taken = Arc::clone(&receiver.taken);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let taken = Arc::clone(&taken);
                std::thread::spawn(move || serve(stream, does, is_pyroscope, &taken));
            }
        });
        receiver
    }

    fn taken(&self) -> Cpu {
        self.taken.lock().unwrap().clone()
    }
}

fn serve(mut stream: TcpStream, does: Does, is_pyroscope: bool, taken: &Mutex<Cpu>) {
    let (mut read, mut part) = (Vec::new(), [0; 16384]);
    let mut more = |read: &mut Vec<u8>, stream: &mut TcpStream| match stream.read(&mut part) {
        Ok(0) | Err(_) => false,
        Ok(length) => {
            read.extend_from_slice(&part[..length]);
            true
        }
    };
    if does == Does::IsSilent {
        while more(&mut read, &mut stream) {}
        return;
    }
    let head = loop {
        if !more(&mut read, &mut stream) {
            return;
        }
        if let Some(end) = read.windows(4).position(|four| four == b"\r\n\r\n") {
            break end + 4;
        }
    };
    let text = String::from_utf8_lossy(&read[..head]).to_ascii_lowercase();
    let length = text.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
    let length: usize = length.unwrap();
    if matches!(does, Does::Resets(limit) if length > limit) {
        rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
        return;
    }
    while read.len() < head + length {
        if !more(&mut read, &mut stream) {
            return;
        }
    }
    let (service, cpu) = cpu_of(&read[head..], is_pyroscope);
    let status = match does {
        Does::Answers(status, limit) if length > limit => status,
        Does::Refuses(name) if name == service => 413,
        _ => 200,
    };
    if status == 200 {
        *taken.lock().unwrap().entry(service).or_default() += cpu;
    }
    let kind = if is_pyroscope { "application/proto" } else { "application/x-protobuf" };
    write!(stream, "HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: 0\r\n\r\n").ok();
}

/// Service and CPU time of a request.
fn cpu_of(body: &[u8], is_pyroscope: bool) -> (String, i64) {
    if is_pyroscope {
        let series = PushRequest::decode(body).unwrap().series.remove(0);
        let name = series.labels.iter().find(|label| label.name == "service_name").unwrap();
        return (name.value.clone(), cpu_of_profile(&series.samples[0].raw_profile));
    }
    let mut unzipped = Vec::new();
    GzDecoder::new(body).read_to_end(&mut unzipped).unwrap();
    let request = ExportProfilesServiceRequest::decode(unzipped.as_slice()).unwrap();
    let strings = &request.dictionary.as_ref().unwrap().string_table;
    let resource = &request.resource_profiles[0];
    let attribute = &resource.resource.as_ref().unwrap().attributes[0];
    let Some(Value::StringValue(service)) = &attribute.value.as_ref().unwrap().value else { panic!() };
    let of_cpu = resource.scope_profiles[0].profiles.iter().filter(|profile| {
        let name = profile.sample_type.unwrap().type_strindex;
        strings[usize::try_from(name).unwrap()] == "cpu"
    });
    let values = of_cpu.flat_map(|profile| &profile.samples).flat_map(|sample| &sample.values);
    (service.clone(), values.sum())
}

fn cpu_of_profile(bytes: &[u8]) -> i64 {
    let profile = perfusion_pprof::decode(bytes).unwrap();
    let name = |kind: &perfusion_pprof::proto::ValueType| {
        profile.string_table[usize::try_from(kind.r#type).unwrap()].clone()
    };
    let at = profile.sample_type.iter().position(|kind| name(kind) == "cpu").unwrap();
    profile.sample.iter().map(|sample| sample.value[at]).sum()
}

/// CPU time by service, as the files have it.
fn cpu_of_files(folder: &Path) -> Cpu {
    let mut cpu = Cpu::new();
    for service in std::fs::read_dir(folder).unwrap().flatten().filter(|entry| entry.path().is_dir()) {
        let name = service.file_name().into_string().unwrap();
        for file in std::fs::read_dir(service.path()).unwrap().flatten() {
            if file.path().to_string_lossy().ends_with(".pb.gz") {
                *cpu.entry(name.clone()).or_default() += cpu_of_profile(&std::fs::read(file.path()).unwrap());
            }
        }
    }
    cpu.retain(|_, cpu| *cpu != 0);
    cpu
}

/// A program under a name of its own, which is its service's.
fn named(scratch: &Scratch, program: &Path, name: &str, arguments: &[&str]) -> App {
    let path = scratch.path(name);
    std::fs::hard_link(program, &path).or_else(|_| std::fs::copy(program, &path).map(drop)).unwrap();
    let program = arguments.iter().fold(Workload::program(path), |program, argument| program.arg(argument));
    program.start().unwrap()
}

/// MiB.
fn resident(pid: u32) -> u64 {
    system_tests::perfusion::memory(pid, "VmRSS")
}

#[test]
fn receivers_that_misbehave_cost_neither_the_daemon_nor_each_other() {
    let needs = [RECORD, &[Need::C]].concat();
    let Some(_turn) = begin("receivers::misbehave", &needs) else { return };
    let (services, time) =
        if long_form() { (200, Duration::from_secs(600)) } else { (40, Duration::from_secs(40)) };
    let scratch = Scratch::new().unwrap();
    let fill = format!("-DFILL={}", "Dictionary_of_String_and_List_of_".repeat(50));
    let program = system_tests::app::compile_c("deepnames", "deepnames", &[&fill]).unwrap();
    let plain = [
        (Does::Takes, false),
        (Does::Takes, true),
        (Does::Resets(50_000), false),
        (Does::Answers(413, 60_000), false),
        (Does::Answers(429, 50_000), true),
        (Does::Refuses("deep"), false),
        (Does::IsSilent, false),
        (Does::IsSilent, true),
    ];
    let receivers: Vec<(Does, bool, Receiver)> = plain
        .into_iter()
        .map(|(does, is_pyroscope)| (does, is_pyroscope, Receiver::start(does, is_pyroscope)))
        .collect();
    let urls = |of_pyroscope: bool| -> String {
        let of = receivers.iter().filter(|(_, is_pyroscope, _)| *is_pyroscope == of_pyroscope);
        let protocol = if of_pyroscope { "" } else { ", protocol: http" };
        of.map(|(.., receiver)| {
            format!("  - {{ url: \"http://127.0.0.1:{}\", timeout: 2s{protocol} }}\n", receiver.port)
        })
        .collect()
    };
    let (port, files, config) = (free_port(), scratch.path("files"), scratch.path("perfusion.yaml"));
    let text = format!(
        "windows: {{ length: 10s }}\nservices: {{ max: 400 }}\n\
         files: {{ directory: {files:?}, keep_free: 0B, max_size: 4GiB }}\n\
         selection: {{ features: {{ waits: {{ enabled: false }} }} }}\n\
         otlp:\n{}pyroscope:\n{}spool: {{ directory: {:?}, keep_free: 0B }}\n\
         telemetry: {{ listen: \"127.0.0.1:{port}\" }}\n\
         limits: {{ memory: 256MiB, cpu: 100%, kill_switch: {:?} }}\n",
        urls(false),
        urls(true),
        scratch.path("spool"),
        scratch.path("run/off"),
    );
    std::fs::write(&config, text).unwrap();

    // Some MiB of stacks in a window of the short form, and some tens of the long one. A build without
    // optimization packs two MiB a second, for each receiver anew.
    let sleep = if long_form() { "8000" } else { "100000" };
    let mut apps = vec![named(&scratch, &program, "deep", &["2000", sleep, "200"])];
    for number in 0..services {
        apps.push(named(&scratch, &program, &format!("small{number}"), &["1000", "400000", "4"]));
    }
    let group = Group::with_memory("perfusion-receivers", CHART_LIMIT).unwrap();
    let mut daemon = Recording::spawn(command(["daemon", "--config"]).arg(&config)).unwrap();
    group.take(daemon.pid()).unwrap();
    daemon.await_progress("ready", DEADLINE).unwrap();

    let (began, mut most) = (Instant::now(), 0);
    while began.elapsed() < time {
        most = most.max(resident(daemon.pid()));
        let_pass(Duration::from_millis(250));
    }
    apps.clear();
    let metrics = || {
        let mut connection = TcpStream::connect(("127.0.0.1", port)).unwrap();
        write!(connection, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut answer = String::new();
        connection.read_to_string(&mut answer).unwrap();
        answer
    };
    let of = |kind: bool, receiver: &Receiver, name: &str| {
        let kind = if kind { "pyroscope" } else { "otlp" };
        let port = receiver.port;
        value(&metrics(), &format!("perfusion_sink_{name}{{sink=\"{kind} http://127.0.0.1:{port}\"}}"))
            .unwrap()
    };
    // The window in which the programs ended, and all that waits for receivers that answer.
    let windows = || value(&metrics(), "perfusion_daemon_windows_total").unwrap();
    let before = windows();
    wait_until("two more windows", DEADLINE, || (windows() >= before + 2.0).then_some(())).unwrap();
    for (does, kind, receiver) in receivers.iter().filter(|(does, ..)| *does != Does::IsSilent) {
        let what = format!("{does:?} to have all");
        wait_until(&what, DEADLINE, || {
            most = most.max(resident(daemon.pid()));
            (of(*kind, receiver, "requests_waiting") == 0.0).then_some(())
        })
        .unwrap_or_else(|error| panic!("{error}\n{}\n{}", daemon.progress(), metrics()));
    }
    let refused: Vec<f64> =
        receivers.iter().map(|(_, kind, receiver)| of(*kind, receiver, "requests_refused_total")).collect();
    let last = metrics();
    let told = Instant::now();
    daemon.signal(Signal::TERM).unwrap();
    let outcome = daemon.finish_well(DEADLINE).unwrap();
    let took = told.elapsed();
    assert!(took < END, "it took {took:?} to end\n{}", outcome.stderr);
    assert_eq!(group.ended_for_memory().unwrap(), 0, "{}", outcome.stderr);
    assert!(most < MEMORY, "{most} MiB were resident\n{}", outcome.stderr);

    let expected = cpu_of_files(&files);
    assert!(expected.len() > services && expected["deep"] > 0, "{expected:?}");
    for ((does, _, receiver), refused) in receivers.iter().zip(refused) {
        let taken = receiver.taken();
        let small = |cpu: &Cpu| -> Cpu {
            cpu.iter().filter(|(name, _)| name.starts_with("small")).map(|(n, c)| (n.clone(), *c)).collect()
        };
        match does {
            // Its stacks pack well: each alone is short enough.
            Does::Takes | Does::Resets(_) | Does::Answers(..) => {
                assert_eq!(taken.get("deep"), Some(&expected["deep"]), "{does:?}\n{last}");
                assert_eq!(refused, 0.0, "{does:?}\n{last}");
            }
            Does::Refuses(_) => {
                assert_eq!(taken.get("deep"), None);
                assert!(refused > 0.0, "{does:?}: what is given up is counted\n{last}");
            }
            Does::IsSilent => {
                assert!(taken.is_empty());
                continue;
            }
        }
        assert_eq!(small(&taken), small(&expected), "{does:?}\n{}", outcome.stderr);
    }
    let lines = outcome.stderr.lines().filter(|line| line.contains("sending a profile"));
    assert!(lines.clone().count() <= 40, "{:#?}", lines.collect::<Vec<_>>());
}
