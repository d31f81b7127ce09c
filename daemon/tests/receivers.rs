//! Receivers that misbehave, made from a table: protocol × what is not taken × how it is not taken.
//! Each is a server of its own. Whatever it does to one service's requests, all of the other
//! services arrives once, and each request has an end that is counted.
//!
//! The short form has each way of not taking something once or twice, and does not wait for the end
//! of what is tried for a minute. With `PERFUSION_TESTS_LONG=1` (`cargo xtask test --long`) it is
//! the whole table with all ends, which takes two minutes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use flate2::read::GzDecoder;
use http_body_util::{BodyExt as _, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use perfusion_export::otlp::proto::ExportProfilesServiceRequest;
use perfusion_export::otlp::proto::any_value::Value;
use perfusion_export::otlp::{Otlp, OtlpOptions, Protocol};
use perfusion_export::parts::SinkSignals;
use perfusion_export::pyroscope::{PushRequest, Pyroscope, PyroscopeOptions};
use perfusion_export::quantity::{ByteSize as Size, HumanDuration};
use perfusion_export::receiver::SpoolOptions;
use perfusion_export::{FinishedProfile, Packed, Sink};
use perfusion_pprof::proto::{Function, Line, Location, Profile, Sample, ValueType};
use prost::Message as _;
use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

/// How a request is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// An HTTP status with a text.
    Status(u16, &'static str),
    /// A gRPC code with a text.
    Code(u32, &'static str),
    /// The connection is reset before all of it was read.
    Reset,
    /// It is closed instead.
    Close,
    /// It is read, and nothing comes.
    Silence,
    /// The answer comes before the body was read, and the connection is closed.
    Early(u16),
}

/// What is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// What is longer than this, as it comes.
    Longer(usize),
    /// All of the service `big`.
    Service,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Grpc,
    Http,
    Pyroscope,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    kind: Kind,
    what: What,
    how: How,
}

/// A request of so many bytes is too long for these receivers.
const LIMIT: usize = 24_000;
/// For one attempt.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Until all that can arrive has arrived.
const WAIT_LIMIT: Duration = Duration::from_secs(150);

fn cases() -> Vec<Case> {
    let http = [
        How::Status(413, "request body too large"),
        How::Status(400, "the request exceeds the maximum size"),
        How::Status(400, "no"),
        How::Status(422, "no"),
        How::Status(429, "rate limit"),
        How::Status(503, "busy"),
        How::Early(413),
        How::Reset,
        How::Close,
        How::Silence,
    ];
    let grpc = [
        How::Code(8, "Received message larger than max"),
        How::Code(8, "quota"),
        How::Code(11, "out of range"),
        How::Code(3, "no"),
        How::Code(14, "busy"),
        How::Code(4, "too late"),
        How::Status(413, ""),
        How::Reset,
        How::Silence,
    ];
    let of = |kind, all: &[How]| -> Vec<Case> {
        let both = |&how| [What::Longer(LIMIT), What::Service].map(|what| Case { kind, what, how });
        all.iter().flat_map(both).collect()
    };
    let all = [of(Kind::Http, &http), of(Kind::Grpc, &grpc), of(Kind::Pyroscope, &http)].concat();
    // Who has not read the request does not know whose it is.
    all.into_iter()
        .filter(|case| !(case.what == What::Service && matches!(case.how, How::Early(_))))
        .collect()
}

/// Of receivers over HTTP/1.1, which are of two kinds, each case with one of them; of gRPC's each
/// way with a half of the cases.
fn sample() -> Vec<Case> {
    let mut ways: Vec<(Kind, How)> = Vec::new();
    let mut is_in = |case: &Case| {
        let known =
            |kind: Kind, ways: &[(Kind, How)]| ways.iter().position(|way| *way == (kind, case.how));
        let kind = if case.kind == Kind::Grpc { Kind::Grpc } else { Kind::Http };
        let at = known(kind, &ways).unwrap_or_else(|| {
            ways.push((kind, case.how));
            ways.len() - 1
        });
        let is_even = at % 2 == 0;
        match case.kind {
            Kind::Http => is_even == (case.what == What::Service),
            Kind::Pyroscope => is_even != (case.what == What::Service),
            Kind::Grpc => is_even == (case.what == What::Service),
        }
    };
    cases().into_iter().filter(|case| is_in(case)).collect()
}

fn is_long_form() -> bool {
    std::env::var_os("PERFUSION_TESTS_LONG").is_some_and(|value| value == "1")
}

/// How often each value of each service arrived.
type Arrived = Arc<Mutex<BTreeMap<(String, i64), u32>>>;

fn unzip(body: &[u8]) -> Vec<u8> {
    let mut unzipped = Vec::new();
    GzDecoder::new(body).read_to_end(&mut unzipped).unwrap();
    unzipped
}

/// Service and values of a request.
fn read(kind: Kind, body: &[u8]) -> (String, Vec<i64>) {
    if kind == Kind::Pyroscope {
        let series = PushRequest::decode(body).unwrap().series.remove(0);
        let name = series.labels.iter().find(|label| label.name == "service_name").unwrap();
        let profile = perfusion_pprof::decode(&series.samples[0].raw_profile).unwrap();
        return (name.value.clone(), profile.sample.iter().map(|sample| sample.value[0]).collect());
    }
    let packed = if kind == Kind::Grpc { &body[5..] } else { body };
    let request = ExportProfilesServiceRequest::decode(unzip(packed).as_slice()).unwrap();
    let resource = &request.resource_profiles[0];
    let attribute = &resource.resource.as_ref().unwrap().attributes[0];
    let Some(Value::StringValue(service)) = &attribute.value.as_ref().unwrap().value else {
        panic!()
    };
    let profiles = &resource.scope_profiles[0].profiles;
    let values =
        profiles.iter().flat_map(|profile| &profile.samples).flat_map(|sample| &sample.values);
    (service.clone(), values.copied().collect())
}

impl Case {
    /// What is refused for good has its end at once, all else after a minute of tries.
    fn ends_soon(self) -> bool {
        match self.how {
            How::Status(status, _) | How::Early(status) => !matches!(status, 429 | 503),
            How::Code(code, _) => !matches!(code, 4 | 11 | 14),
            How::Reset | How::Close | How::Silence => false,
        }
    }

    fn is_taken(self, body: &[u8]) -> bool {
        match self.what {
            What::Longer(limit) => body.len() <= limit,
            What::Service => read(self.kind, body).0 != "big",
        }
    }

    fn take(self, body: &[u8], arrived: &Arrived) {
        let (service, values) = read(self.kind, body);
        let mut arrived = arrived.lock().unwrap();
        for value in values {
            *arrived.entry((service.clone(), value)).or_default() += 1;
        }
    }

    /// Starts the server, which lives as long as the process.
    fn serve(self, arrived: Arrived) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            if self.kind == Kind::Grpc {
                self.serve_http2(listener, &arrived);
            } else {
                for stream in listener.incoming().map_while(Result::ok) {
                    let arrived = Arc::clone(&arrived);
                    std::thread::spawn(move || self.serve_http1(stream, &arrived));
                }
            }
        });
        url
    }

    fn serve_http1(self, mut stream: TcpStream, arrived: &Arrived) {
        let mut read = Vec::new();
        let mut part = [0; 4096];
        let head = loop {
            match stream.read(&mut part) {
                Ok(0) | Err(_) => return,
                Ok(length) => read.extend_from_slice(&part[..length]),
            }
            if let Some(end) = read.windows(4).position(|four| four == b"\r\n\r\n") {
                break end + 4;
            }
        };
        let text = String::from_utf8_lossy(&read[..head]).to_ascii_lowercase();
        let length =
            text.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok());
        let length: usize = length.unwrap();
        let is_long = matches!(self.what, What::Longer(limit) if length > limit);
        if is_long && matches!(self.how, How::Early(_) | How::Reset | How::Close) {
            return self.refuse(stream);
        }
        while read.len() < head + length {
            match stream.read(&mut part) {
                Ok(0) | Err(_) => return,
                Ok(got) => read.extend_from_slice(&part[..got]),
            }
        }
        let body = &read[head..];
        if !self.is_taken(body) {
            return self.refuse(stream);
        }
        self.take(body, arrived);
        let kind =
            if self.kind == Kind::Http { "application/x-protobuf" } else { "application/proto" };
        let answer =
            format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: 0\r\n\r\n");
        stream.write_all(answer.as_bytes()).ok();
    }

    fn refuse(self, mut stream: TcpStream) {
        match self.how {
            How::Status(status, text) => {
                let length = text.len();
                write!(stream, "HTTP/1.1 {status} No\r\ncontent-length: {length}\r\n\r\n{text}")
                    .ok();
            }
            How::Early(status) => {
                write!(
                    stream,
                    "HTTP/1.1 {status} No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
                )
                .ok();
            }
            How::Reset => {
                rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
            }
            How::Silence => {
                let mut rest = [0; 64];
                while stream.read(&mut rest).is_ok_and(|length| length > 0) {}
            }
            How::Close | How::Code(..) => {}
        }
    }

    fn serve_http2(self, listener: TcpListener, arrived: &Arrived) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            listener.set_nonblocking(true).unwrap();
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let arrived = Arc::clone(arrived);
                connections.spawn(async move {
                    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
                        let arrived = Arc::clone(&arrived);
                        async move { self.answer(request, &arrived).await }
                    });
                    let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                    server.serve_connection(TokioIo::new(stream), service).await.ok();
                });
            }
        });
    }

    async fn answer(
        self,
        request: Request<Incoming>,
        arrived: &Arrived,
    ) -> Result<Response<Empty<Bytes>>, std::io::Error> {
        let body = request.into_body().collect().await.map_err(std::io::Error::other)?.to_bytes();
        let with = |status: u16, code: Option<u32>, text: &str| {
            let mut response = Response::builder().status(status);
            if let Some(code) = code {
                response = response.header("grpc-status", code).header("grpc-message", text);
            }
            Ok(response.body(Empty::new()).unwrap())
        };
        if self.is_taken(&body) {
            self.take(&body, arrived);
            return with(200, Some(0), "");
        }
        match self.how {
            How::Code(code, text) => with(200, Some(code), text),
            How::Status(status, _) => with(status, None, ""),
            How::Silence => std::future::pending().await,
            How::Reset | How::Close | How::Early(_) => {
                Err(std::io::ErrorKind::ConnectionReset.into())
            }
        }
    }
}

/// Letters that do not compress well.
fn noise(seed: u64, length: usize) -> String {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..length)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            char::from(b"0123456789abcdefghijklmnopqrstuv"[usize::try_from(state >> 59).unwrap()])
        })
        .collect()
}

/// What a service did: samples with these values, each of one frame with a long name.
fn window(service: &str, values: std::ops::Range<i64>, name_bytes: usize) -> FinishedProfile {
    let mut profile = Profile {
        sample_type: vec![ValueType { r#type: 1, unit: 2 }],
        default_sample_type: 1,
        string_table: ["", "cpu", "nanoseconds"].map(str::to_owned).to_vec(),
        ..Profile::default()
    };
    for (value, id) in values.zip(1..) {
        let name = i64::try_from(profile.string_table.len()).unwrap();
        profile.string_table.push(noise(value.cast_unsigned(), name_bytes));
        profile.function.push(Function { id, name, system_name: name, ..Function::default() });
        let line = vec![Line { function_id: id, ..Line::default() }];
        profile.location.push(Location { id, line, ..Location::default() });
        profile.sample.push(Sample {
            location_id: vec![id],
            value: vec![value],
            label: Vec::new(),
        });
    }
    FinishedProfile {
        service: service.into(),
        labels: BTreeMap::new(),
        start: SystemTime::now(),
        duration: Duration::from_secs(1),
        profile: Packed::new(perfusion_pprof::pack(&profile).unwrap()),
    }
}

fn run(case: Case) -> Result<(), String> {
    let arrived = Arrived::default();
    let url = case.serve(Arc::clone(&arrived));
    let folder = tempfile::tempdir().unwrap();
    let spool = SpoolOptions {
        directory: Some(folder.path().to_owned()),
        keep_free: Size(0),
        ..SpoolOptions::default()
    };
    let timeout = HumanDuration(TIMEOUT);
    let protocol = if case.kind == Kind::Grpc { Protocol::Grpc } else { Protocol::Http };
    let mut sink: Box<dyn Sink> = if case.kind == Kind::Pyroscope {
        let options = PyroscopeOptions { url, timeout, ..PyroscopeOptions::default() };
        Box::new(Pyroscope::open(&options, &spool).unwrap())
    } else {
        let options = OtlpOptions { url, timeout, protocol, ..OtlpOptions::default() };
        Box::new(Otlp::open(&options, &spool).unwrap())
    };
    let mut expected: BTreeMap<(String, i64), u32> = BTreeMap::new();
    let mut put = |sink: &mut Box<dyn Sink>, service: &str, values: std::ops::Range<i64>, bytes| {
        expected.extend(values.clone().map(|value| ((service.to_owned(), value), 1)));
        sink.put(&window(service, values, bytes)).unwrap();
    };
    // 60 samples of 2 KB are some 80 KB as they are sent: two windows of them.
    let samples: i64 = if is_long_form() { 60 } else { 24 };
    put(&mut sink, "big", 1..samples, 2000);
    put(&mut sink, "big", 100..100 + samples, 2000);
    let has_its_end = is_long_form() || case.what != What::Service || case.ends_soon();
    let counter = |sink: &dyn Sink, name: &str| {
        sink.counters().iter().find(|(known, _)| *known == name).map_or(0, |(_, value)| *value)
    };
    let waiting = |sink: &dyn Sink| sink.backlog().unwrap().requests;
    let (began, mut last_small, mut value) = (Instant::now(), Instant::now(), 0);
    let is_of_big = |entry: &(&(String, i64), &u32)| entry.0.0 == "big";
    loop {
        // Others come now and then: that they are taken shows that it is not the receiver that
        // fails.
        if value < 180 && (value == 0 || last_small.elapsed() > Duration::from_millis(500)) {
            for service in ["one", "two"] {
                put(&mut sink, service, value + 1..value + 4, 50);
            }
            (last_small, value) = (Instant::now(), value + 3);
        }
        let is_tried = value >= 30 && counter(&*sink, "retries") >= 4;
        let done = value >= 9 && waiting(&*sink) == 0 || is_tried && !has_its_end;
        if done || began.elapsed() > WAIT_LIMIT {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let lasted = began.elapsed();
    let began = Instant::now();
    sink.close(Instant::now() + Duration::from_millis(500));
    let (took, waits) = (began.elapsed(), waiting(&*sink));
    let arrived = arrived.lock().unwrap().clone();
    let count = |name| counter(&*sink, name);
    let ends = count("requests_sent") + count("requests_refused") + count("requests_split");
    let state = format!(
        "{case:?}: {} of {} arrived in {lasted:?}, {waits} wait, counters {:?}, causes {:?}",
        arrived.len(),
        expected.len(),
        sink.counters().iter().filter(|(_, value)| *value > 0).collect::<Vec<_>>(),
        sink.backlog().unwrap().causes
    );
    let check =
        |is_so: bool, what: &str| if is_so { Ok(()) } else { Err(format!("{what}: {state}")) };
    let small = |entry: &(&(String, i64), &u32)| !is_of_big(entry);
    let twice = arrived.iter().filter(|(_, times)| **times > 1).count();
    // The answer to a silent receiver's request may be what is missing: it has not read it as
    // taken.
    check(twice == 0, "something arrives twice")?;
    check(arrived.iter().filter(small).eq(expected.iter().filter(small)), "others are held up")?;
    check(took < Duration::from_secs(1), "the end takes long")?;
    check(count("requests_made") == ends + waits, "a request has no end that is counted")?;
    let of_big = arrived.iter().filter(is_of_big).count();
    match case.what {
        What::Longer(_) => check(
            of_big == expected.iter().filter(is_of_big).count(),
            "not all that is short enough arrives",
        )?,
        What::Service if has_its_end => {
            check(of_big == 0 && count("requests_refused") > 0, "it has no end")?;
        }
        // The two windows wait, or what they were split into.
        What::Service => return check(of_big == 0 && waits > 0, "it is given up at once"),
    }
    check(waits == 0, "something waits for ever")
}

#[test]
fn what_a_receiver_does_to_one_service_is_nothing_to_the_others_and_has_an_end() {
    let (all, sample) = (cases(), sample());
    assert!(all.len() >= 40 && sample.len() >= 25, "{}, {}", all.len(), sample.len());
    let all = if is_long_form() { all } else { sample };
    let threads: Vec<_> =
        all.into_iter().map(|case| std::thread::spawn(move || run(case))).collect();
    let failed: Vec<String> =
        threads.into_iter().filter_map(|thread| thread.join().unwrap().err()).collect();
    assert!(failed.is_empty(), "{} receivers:\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn what_a_daemon_had_no_time_to_split_is_sent_by_the_next_one() {
    let case = Case { kind: Kind::Http, what: What::Longer(usize::MAX), how: How::Reset };
    let arrived = Arrived::default();
    let url = case.serve(Arc::clone(&arrived));
    let folder = tempfile::tempdir().unwrap();
    let spool = SpoolOptions {
        directory: Some(folder.path().to_owned()),
        keep_free: Size(0),
        ..SpoolOptions::default()
    };
    let options = OtlpOptions {
        url,
        protocol: Protocol::Http,
        max_request: Size(64 << 10),
        ..OtlpOptions::default()
    };
    let open = || Otlp::open(&options, &spool).unwrap();
    let mut sink = open();
    let hurry = SinkSignals::default();
    sink.hurries(hurry.clone());
    sink.put(&window("web", 1..100, 2000)).unwrap();
    hurry.end_by(Instant::now());
    sink.put(&window("web", 100..200, 2000)).unwrap();
    sink.close(Instant::now() + Duration::from_secs(60));
    let first: Vec<i64> = arrived.lock().unwrap().keys().map(|(_, value)| *value).collect();
    assert_eq!(first, (1..100).collect::<Vec<_>>());
    assert_eq!(sink.backlog().unwrap().requests, 1, "the window waits as it is");
    drop(sink);

    let mut next = open();
    next.window_over();
    next.close(Instant::now() + Duration::from_secs(60));
    let all: BTreeMap<(String, i64), u32> =
        (1..200).map(|value| (("web".to_owned(), value), 1)).collect();
    assert_eq!(*arrived.lock().unwrap(), all);
    assert_eq!(next.backlog().unwrap().requests, 0);
}

#[test]
fn a_window_that_finds_its_sink_busy_waits_in_the_spool_and_arrives_once() {
    let case = Case { kind: Kind::Http, what: What::Longer(usize::MAX), how: How::Reset };
    let arrived = Arrived::default();
    let url = case.serve(Arc::clone(&arrived));
    let folder = tempfile::tempdir().unwrap();
    let spool = SpoolOptions {
        directory: Some(folder.path().to_owned()),
        keep_free: Size(0),
        ..SpoolOptions::default()
    };
    let options = OtlpOptions {
        url,
        protocol: Protocol::Http,
        max_request: Size(64 << 10),
        ..OtlpOptions::default()
    };
    let mut sink = Otlp::open(&options, &spool).unwrap();
    let hurry = SinkSignals::default();
    sink.hurries(hurry.clone());
    hurry.waits().store(true, Ordering::Relaxed);
    sink.put(&window("web", 1..100, 2000)).unwrap();
    sink.put(&window("shop", 100..200, 2000)).unwrap();
    sink.window_over();
    hurry.waits().store(false, Ordering::Relaxed);
    sink.put(&window("web", 200..300, 2000)).unwrap();
    assert_eq!((sink.backlog().unwrap().requests, arrived.lock().unwrap().len()), (3, 0));
    sink.window_over();
    sink.close(Instant::now() + Duration::from_secs(60));
    let service = |value| if (100..200).contains(&value) { "shop" } else { "web" };
    let all: BTreeMap<(String, i64), u32> =
        (1..300).map(|value| ((service(value).to_owned(), value), 1)).collect();
    assert_eq!(*arrived.lock().unwrap(), all);
    assert_eq!(sink.backlog().unwrap().requests, 0);
}
