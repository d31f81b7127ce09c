//! The daemon's profiles in a real Collector, by gRPC and HTTP, against the files of the same run.
//! Needs a Collector with the profiles signal (`cargo xtask collector` builds one and runs this).

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::Value;
use system_tests::Workload;
use system_tests::environment::{Need, RECORD, begin};
use system_tests::perfusion::{Recording, SLACK, Scratch, command};
use system_tests::wait::wait_until;

use crate::node::free_port;

/// Sum of each sample type.
type Totals = BTreeMap<String, i64>;

/// Kills a program in the background when the test is over.
struct Background(Child);

impl Drop for Background {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Takes what a Collector posts to /grpc and /http, as JSON, and answers 200.
#[derive(Clone, Default)]
struct Received(Arc<Mutex<BTreeMap<String, Vec<Value>>>>);

impl Received {
    fn listen(&self) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let received = self.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let received = received.clone();
                std::thread::spawn(move || received.serve(stream));
            }
        });
        port
    }

    fn serve(&self, stream: TcpStream) {
        let mut reader = BufReader::new(stream);
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            let path = line.split(' ').nth(1).unwrap().split('/').nth(1).unwrap().to_owned();
            let mut length = 0;
            loop {
                line.clear();
                reader.read_line(&mut line).unwrap();
                if line.trim().is_empty() {
                    break;
                }
                let (name, value) = line.split_once(':').unwrap();
                if name.eq_ignore_ascii_case("content-length") {
                    length = value.trim().parse().unwrap();
                }
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            let value = serde_json::from_slice(&body).unwrap();
            self.0.lock().unwrap().entry(path).or_default().push(value);
            let answer =
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
            reader.get_mut().write_all(answer.as_bytes()).unwrap();
        }
    }

    fn totals(&self, path: &str) -> Totals {
        let mut totals = Totals::new();
        for request in self.0.lock().unwrap().get(path).into_iter().flatten() {
            let strings = request["dictionary"]["stringTable"].as_array().unwrap();
            for profile in each(request, "resourceProfiles")
                .flat_map(|of| each(of, "scopeProfiles"))
                .flat_map(|of| each(of, "profiles"))
            {
                let name = usize::try_from(profile["sampleType"]["typeStrindex"].as_u64().unwrap())
                    .unwrap();
                let sum = totals.entry(strings[name].as_str().unwrap().to_owned()).or_default();
                for value in each(profile, "samples").flat_map(|sample| each(sample, "values")) {
                    // Protobuf's JSON has 64-bit numbers as text.
                    *sum += value.as_str().unwrap().parse::<i64>().unwrap();
                }
            }
        }
        totals
    }

    fn services(&self, path: &str) -> Vec<String> {
        let mut names = Vec::new();
        for request in self.0.lock().unwrap().get(path).into_iter().flatten() {
            for resource in each(request, "resourceProfiles") {
                let attributes = &resource["resource"];
                let name = each(attributes, "attributes")
                    .find(|attribute| attribute["key"] == "service.name")
                    .unwrap();
                names.push(name["value"]["stringValue"].as_str().unwrap().to_owned());
            }
        }
        names
    }
}

fn each<'a>(of: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> {
    of[field].as_array().into_iter().flatten()
}

fn totals_of_files(folder: &Path, totals: &mut Totals) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            totals_of_files(&path, totals);
        } else if path.to_string_lossy().ends_with(".pb.gz") {
            let profile = perfusion_pprof::decode(&std::fs::read(&path).unwrap()).unwrap();
            for (at, kind) in profile.sample_type.iter().enumerate() {
                let name = &profile.string_table[usize::try_from(kind.r#type).unwrap()];
                let sum: i64 = profile.sample.iter().map(|sample| sample.value[at]).sum();
                if sum != 0 {
                    *totals.entry(name.clone()).or_default() += sum;
                }
            }
        }
    }
}

/// A Collector that receives by both protocols and passes each on to its own path.
fn collector(program: &str, scratch: &Scratch, grpc: u16, http: u16, to: u16) -> Background {
    let config = scratch.path("collector.yaml");
    let exporter = |path: &str| {
        format!(
            "{{ profiles_endpoint: \"http://127.0.0.1:{to}/{path}\", encoding: json, compression: \
             none, sending_queue: {{ enabled: false }} }}"
        )
    };
    let text = format!(
        "receivers:\n  otlp/grpc: \
         {{ protocols: {{ grpc: {{ endpoint: \"127.0.0.1:{grpc}\" }} }} }}\n  otlp/http: \
         {{ protocols: {{ http: {{ endpoint: \"127.0.0.1:{http}\" }} }} }}\n\
         exporters:\n  otlp_http/grpc: {}\n  otlp_http/http: {}\n\
         service:\n  telemetry: {{ metrics: {{ level: none }} }}\n  pipelines:\n    profiles/grpc: \
         {{ receivers: [otlp/grpc], exporters: [otlp_http/grpc] }}\n    profiles/http: \
         {{ receivers: [otlp/http], exporters: [otlp_http/http] }}\n",
        exporter("grpc"),
        exporter("http"),
    );
    std::fs::write(&config, text).unwrap();
    let log = std::fs::File::create(scratch.path("collector.log")).unwrap();
    let mut run = Command::new(program);
    run.arg("--config")
        .arg(&config)
        .arg("--feature-gates=service.profilesSupport")
        .stdout(Stdio::null())
        .stderr(log);
    Background(run.spawn().unwrap())
}

#[test]
#[ignore = "needs a Collector: cargo xtask collector"]
fn a_collector_gets_the_same_totals_as_the_files_by_grpc_and_http_and_after_an_outage() {
    let needs = [RECORD, &[Need::C]].concat();
    let Some(_turn) = begin("otlp::totals", &needs) else { return };
    let program = std::env::var("PERFUSION_OTELCOL").expect("PERFUSION_OTELCOL names no Collector");
    let scratch = Scratch::new().unwrap();
    let received = Received::default();
    let (grpc, http, to) = (free_port(), free_port(), received.listen());
    let files = scratch.path("files");
    let config = scratch.path("perfusion.yaml");
    let text = format!(
        "windows: {{ length: 1s, aligned: false }}\nfiles: \
         {{ directory: {files:?}, keep_free: 0B }}\n\
         otlp:\n  - {{ url: \"http://127.0.0.1:{grpc}\", protocol: grpc, max_request: 64KiB }}\n  \
         - {{ url: \"http://127.0.0.1:{http}\", protocol: http }}\n\
         spool: {{ directory: {:?}, keep_free: 0B }}\ntelemetry: {{ listen: null }}\nlimits: \
         {{ kill_switch: {:?} }}\nlog: {{ level: debug }}\n",
        scratch.path("spool"),
        scratch.path("run/off"),
    );
    std::fs::write(&config, text).unwrap();
    let app = Workload::native("spin", &[]).unwrap().start().unwrap();
    let daemon = Recording::spawn(command(["daemon", "--config"]).arg(&config)).unwrap();

    // Nobody is there yet: what is made waits, beside the lock of each spool.
    let named = |folder: &Path| -> Vec<(String, PathBuf)> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries
            .map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()))
            .collect()
    };
    let spooled = |kind: &str| {
        let spools =
            named(&scratch.path("spool")).into_iter().filter(|(name, _)| name.starts_with(kind));
        spools
            .flat_map(|(_, spool)| named(&spool))
            .filter(|(name, _)| name != ".perfusion.lock")
            .count()
    };
    wait_until("both spools to hold something", SLACK, || (spooled("otlp-http") > 4).then_some(()))
        .unwrap();
    let _collector = collector(&program, &scratch, grpc, http, to);
    wait_until("both spools to be sent", Duration::from_secs(120), || {
        (!received.totals("grpc").is_empty() && !received.totals("http").is_empty()).then_some(())
    })
    .unwrap_or_else(|error| {
        panic!(
            "{error}\n{}\n{}",
            daemon.progress(),
            std::fs::read_to_string(scratch.path("collector.log")).unwrap()
        )
    });
    daemon.signal(rustix::process::Signal::TERM).unwrap();
    let outcome = daemon.finish_well(SLACK).unwrap();
    assert_eq!(spooled("otlp-http"), 0, "something still waits\n{}", outcome.stderr);

    let mut expected = Totals::new();
    totals_of_files(&files, &mut expected);
    assert!(expected["cpu"] > 0 && expected["wall"] > 0, "{expected:?}");
    assert_eq!(received.totals("http"), expected, "{}", outcome.stderr);
    assert_eq!(received.totals("grpc"), expected, "{}", outcome.stderr);
    let services: std::collections::BTreeSet<String> =
        received.services("grpc").into_iter().collect();
    assert!(services.contains("spin"), "{services:?}");
    writeln!(
        std::io::stderr(),
        "the same by files, gRPC and HTTP, of {} services: {expected:?}",
        services.len()
    )
    .unwrap();
    drop(app);
}
