//! The daemon's profiles at a Pyroscope server. The real one is not to be had here: this one is
//! strict, takes only what its published messages and default limits allow, and what it took is
//! compared with the files of the same run.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use perfusion_export::pyroscope::{Pyroscope, PyroscopeOptions};
use perfusion_export::receiver::SpoolOptions;
use perfusion_export::{FinishedProfile, Packed, Sink as _};
use perfusion_pprof::proto::{Function, Label, Line, Location, Profile, Sample, ValueType};
use prost::Message as _;
use system_tests::Workload;
use system_tests::environment::{Need, RECORD, begin_beside};
use system_tests::perfusion::{Recording, SLACK, Scratch, command};
use system_tests::wait::wait_until;

/// The messages as the server publishes them (grafana/pyroscope, api/push/v1/push.proto and
/// api/types/v1/types.proto), written down here again on purpose: a test that reads with the code
/// that wrote would not see a wrong field number.
mod published {
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct PushRequest {
        #[prost(message, repeated, tag = "1")]
        pub(super) series: Vec<RawProfileSeries>,
    }
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct RawProfileSeries {
        #[prost(message, repeated, tag = "1")]
        pub(super) labels: Vec<LabelPair>,
        #[prost(message, repeated, tag = "2")]
        pub(super) samples: Vec<RawSample>,
        #[prost(message, repeated, tag = "3")]
        pub(super) annotations: Vec<ProfileAnnotation>,
    }
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct RawSample {
        #[prost(bytes = "vec", tag = "1")]
        pub(super) raw_profile: Vec<u8>,
        #[prost(string, tag = "2")]
        pub(super) id: String,
    }
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct LabelPair {
        #[prost(string, tag = "1")]
        pub(super) name: String,
        #[prost(string, tag = "2")]
        pub(super) value: String,
    }
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct ProfileAnnotation {
        #[prost(string, tag = "1")]
        pub(super) key: String,
        #[prost(string, tag = "2")]
        pub(super) value: String,
    }
}

/// What the server takes by default (pkg/validation/limits.go).
const MOST_BYTES: usize = 4 << 20;
const MOST_SAMPLES: usize = 16_000;
/// Bytes of a tenant, before compression and with the labels: so many at once
/// (`ingestion_burst_size_mb`), and so many more in a second (`ingestion_rate_mb`).
const BURST: f64 = 2.0 * 1_048_576.0;
const RATE: f64 = 4.0 * 1_048_576.0;

/// Sum of each sample type of each service.
type Totals = BTreeMap<(String, String), i64>;
/// Name and value of each label of a series.
type Series = BTreeMap<String, String>;

/// What the server took, and what was wrong with what it did not.
#[derive(Default)]
struct Taken {
    totals: Totals,
    /// Those that it has made of labels of pushes and samples.
    series: BTreeSet<Series>,
    pushes: usize,
    largest_samples: usize,
    largest_bytes: usize,
    wrong: Vec<String>,
    /// So many answers are "try again".
    away: usize,
    /// What is left of the burst, and as of when; none before the first push.
    bucket: Option<(f64, Instant)>,
}

/// What a push is answered that is not taken.
enum Not {
    Now,
    Ever(String),
}

impl From<String> for Not {
    fn from(wrong: String) -> Self {
        Self::Ever(wrong)
    }
}

fn serve(stream: TcpStream, taken: &Mutex<Taken>) {
    let mut reader = BufReader::new(stream);
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        if line.trim().is_empty() {
            break;
        }
        lines.push(line.trim().to_ascii_lowercase());
    }
    let length: usize = lines
        .iter()
        .find_map(|line| line.strip_prefix("content-length: ")?.parse().ok())
        .unwrap_or(0);
    let mut body = vec![0; length];
    // One that hung up in the middle sends it again.
    if reader.read_exact(&mut body).is_err() {
        return;
    }
    let mut taken = taken.lock().unwrap();
    let answer = if taken.away > 0 {
        taken.away -= 1;
        "HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: \
         close\r\n\r\n"
    } else {
        match take(&lines, &body, &mut taken) {
            Ok(()) => {
                "HTTP/1.1 200 OK\r\ncontent-type: application/proto\r\ncontent-length: \
                 0\r\nconnection: close\r\n\r\n"
            }
            Err(Not::Now) => {
                "HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            }
            Err(Not::Ever(wrong)) => {
                taken.wrong.push(wrong);
                "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            }
        }
    };
    reader.get_mut().write_all(answer.as_bytes()).ok();
}

/// Checks as the distributor does (grafana/pyroscope, pkg/distributor/distributor.go and
/// pkg/validation/validate.go) and adds up.
fn take(head: &[String], body: &[u8], taken: &mut Taken) -> Result<(), Not> {
    let has = |line: &str| head.iter().any(|known| known == line);
    if head[0] != "post /push.v1.pusherservice/push http/1.1"
        || !has("content-type: application/proto")
    {
        return Err(format!("{head:?}").into());
    }
    if !has("connect-protocol-version: 1") || !has("x-scope-orgid: team-a") {
        return Err(format!("{head:?}").into());
    }
    let request = published::PushRequest::decode(body).map_err(|error| error.to_string())?;
    if request.encode_to_vec() != body {
        return Err("fields that the messages do not have".to_owned().into());
    }
    for series in &request.series {
        if !series.labels.is_sorted_by(|a, b| a.name < b.name) {
            return Err(format!("not in order: {:?}", series.labels).into());
        }
        let own: Series =
            series.labels.iter().map(|label| (label.name.clone(), label.value.clone())).collect();
        let service = check_labels(&own)?;
        for sample in &series.samples {
            let profile =
                perfusion_pprof::decode(&sample.raw_profile).map_err(|error| error.to_string())?;
            let mut unpacked = Vec::new();
            let mut gzip = flate2::read::MultiGzDecoder::new(sample.raw_profile.as_slice());
            gzip.read_to_end(&mut unpacked).map_err(|error| error.to_string())?;
            let bytes = unpacked.len();
            let labels: usize = own.iter().map(|(name, value)| name.len() + value.len()).sum();
            limit_rate(bytes + labels, taken)?;
            if bytes > MOST_BYTES
                || profile.sample.len() > MOST_SAMPLES
                || profile.sample.is_empty()
            {
                return Err(format!("{bytes} bytes, {} samples", profile.sample.len()).into());
            }
            if profile.string_table.iter().any(|text| text.len() > 65_535) {
                return Err("a symbol is too long".to_owned().into());
            }
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
            let age = now.as_nanos() as i64 - profile.time_nanos;
            if !(-600_000_000_000..=3_600_000_000_000).contains(&age) {
                return Err(format!("{age} ns old").into());
            }
            let series = series_of(&own, &profile);
            for labels in &series {
                check_labels(labels)?;
            }
            taken.series.extend(series);
            taken.largest_samples = taken.largest_samples.max(profile.sample.len());
            taken.largest_bytes = taken.largest_bytes.max(bytes);
            add(&profile, &service, &mut taken.totals);
        }
    }
    taken.pushes += 1;
    Ok(())
}

/// Takes them out of the burst (`rateLimit`). What alone is more than that could be sent again for
/// ever.
fn limit_rate(bytes: usize, taken: &mut Taken) -> Result<(), Not> {
    let (bytes, now) = (bytes as f64, Instant::now());
    if bytes > BURST {
        return Err(format!("{bytes} bytes in one push, which is more than a burst").into());
    }
    let (left, at) = taken.bucket.unwrap_or((BURST, now));
    let left = (left + RATE * now.duration_since(at).as_secs_f64()).min(BURST);
    if bytes > left {
        return Err(Not::Now);
    }
    taken.bucket = Some((left - bytes, now));
    Ok(())
}

/// One for each set of texts that label samples, besides the push's own labels, which go first
/// (pkg/model/pprofsplit, `VisitSampleSeries`).
fn series_of(own: &Series, profile: &Profile) -> BTreeSet<Series> {
    let text = |place: i64| profile.string_table[usize::try_from(place).unwrap()].clone();
    let of = |sample: &Sample| {
        let mut labels = own.clone();
        for label in sample.label.iter().filter(|label| label.str > 0) {
            labels.entry(text(label.key)).or_insert_with(|| text(label.str));
        }
        labels
    };
    profile.sample.iter().map(of).collect()
}

/// The service's name.
fn check_labels(labels: &Series) -> Result<String, String> {
    let plain = |name: &str| {
        !name.is_empty()
            && name.len() <= 1024
            && name.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_')
            && !name.starts_with(|c: char| c.is_ascii_digit())
    };
    let good = labels.iter().all(|(name, value)| plain(name) && (1..=2048).contains(&value.len()));
    match (labels.get("__name__"), labels.get("service_name")) {
        (Some(_), Some(service)) if good && labels.len() <= 30 => Ok(service.clone()),
        _ => Err(format!("{labels:?}")),
    }
}

fn add(profile: &Profile, service: &str, totals: &mut Totals) {
    for (at, kind) in profile.sample_type.iter().enumerate() {
        let name = &profile.string_table[usize::try_from(kind.r#type).unwrap()];
        let sum: i64 = profile.sample.iter().map(|sample| sample.value[at]).sum();
        if sum != 0 {
            *totals.entry((service.to_owned(), name.clone())).or_default() += sum;
        }
    }
}

/// Serves at a port of its own.
fn listen(taken: &Arc<Mutex<Taken>>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let taken = Arc::clone(taken);
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            serve(stream, &taken);
        }
    });
    port
}

/// So many samples, each with a place and a name of its own, of so many bytes, of a thread of its
/// own in one of two pods.
fn profile(samples: u64, name_bytes: usize) -> Profile {
    const FIXED: [&str; 10] = [
        "",
        "samples",
        "count",
        "cpu",
        "nanoseconds",
        "thread_name",
        "k8s.pod.name",
        "web-0",
        "web-1",
        "pid",
    ];
    let mut string_table: Vec<String> = FIXED.map(str::to_owned).to_vec();
    let mut profile = Profile {
        sample_type: vec![ValueType { r#type: 1, unit: 2 }, ValueType { r#type: 3, unit: 4 }],
        period_type: Some(ValueType { r#type: 3, unit: 4 }),
        period: 10_000_000,
        default_sample_type: 3,
        duration_nanos: 60_000_000_000,
        ..Profile::default()
    };
    for id in 1..=samples {
        let name = i64::try_from(string_table.len()).unwrap();
        string_table.push(format!("{id:0name_bytes$}"));
        profile.function.push(Function { id, name, system_name: name, ..Function::default() });
        let line = vec![Line { function_id: id, ..Line::default() }];
        profile.location.push(Location { id, line, ..Location::default() });
        let value = vec![1, i64::try_from(id).unwrap()];
        let label = vec![
            Label { key: 5, str: name, ..Label::default() },
            Label { key: 6, str: 7 + i64::try_from(id % 2).unwrap(), ..Label::default() },
            Label { key: 9, num: i64::try_from(id).unwrap(), ..Label::default() },
        ];
        profile.sample.push(Sample { location_id: vec![id], value, label });
    }
    profile.string_table = string_table;
    profile
}

#[test]
fn a_profile_that_is_longer_than_the_server_takes_arrives_in_parts_and_nothing_is_lost() {
    let Some(_turn) = begin_beside("pyroscope: parts", &[]) else { return };
    let scratch = Scratch::new().unwrap();
    // Too many samples, and too many bytes.
    for (samples, name_bytes) in [(17_000, 8), (4500, 1000)] {
        let taken = Arc::new(Mutex::new(Taken::default()));
        let mut options = PyroscopeOptions {
            url: format!("http://127.0.0.1:{}", listen(&taken)),
            ..PyroscopeOptions::default()
        };
        options.reach.headers.insert("x-scope-orgid".to_owned(), "team-a".to_owned());
        // A server that is slow to read what a busy machine sends it gets it once all the same.
        options.timeout.0 = SLACK;
        let mut spool =
            SpoolOptions { directory: Some(scratch.path("spool")), ..SpoolOptions::default() };
        spool.keep_free.0 = 0;
        let mut sink = Pyroscope::open(&options, &spool).unwrap();
        let now = std::time::SystemTime::now();
        let mut profile = profile(samples, name_bytes);
        profile.time_nanos =
            i64::try_from(now.duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos()).unwrap();
        perfusion_pprof::validate(&profile).unwrap();
        assert!(profile.sample.len() > MOST_SAMPLES || profile.encoded_len() > MOST_BYTES);
        let mut expected = Totals::new();
        add(&profile, "shop", &mut expected);
        let finished = FinishedProfile {
            service: "shop".into(),
            labels: BTreeMap::new(),
            start: now,
            duration: std::time::Duration::from_secs(60),
            profile: Packed::new(perfusion_pprof::pack(&profile).unwrap()),
        };
        sink.put(&finished).unwrap();
        let counter = |name: &str| sink.counters().into_iter().find(|(n, _)| *n == name).unwrap().1;
        // All parts together are more than a burst: the server has some of them wait.
        wait_until("all parts", SLACK, || {
            (counter("requests_sent") + counter("requests_refused") == counter("requests_made"))
                .then_some(())
        })
        .unwrap_or_else(|error| panic!("{error}: {:?}", sink.counters()));
        assert_eq!(counter("samples_too_long"), 0);
        sink.close(std::time::Instant::now() + SLACK);
        let taken = taken.lock().unwrap();
        assert_eq!(taken.wrong, [""; 0]);
        assert_eq!(taken.totals, expected);
        assert!(taken.pushes >= 2, "{} parts", taken.pushes);
        assert!(taken.largest_samples <= MOST_SAMPLES && taken.largest_bytes as f64 <= BURST);
        let pods =
            taken.series.iter().map(|series| (series.len(), series["k8s_pod_name"].as_str()));
        assert_eq!(pods.collect::<Vec<_>>(), [(3, "web-0"), (3, "web-1")]);
    }
}

#[test]
fn a_strict_server_takes_every_push_also_after_it_was_away_and_has_the_totals_of_the_files() {
    let Some(_turn) = begin_beside("pyroscope", &[RECORD, &[Need::C]].concat()) else { return };
    let taken = Arc::new(Mutex::new(Taken { away: 2, ..Taken::default() }));
    let port = listen(&taken);
    let scratch = Scratch::new().unwrap();
    let (config, files) = (scratch.path("perfusion.yaml"), scratch.path("files"));
    let text = format!(
        "windows: {{ length: 1s, aligned: false }}\nfiles: \
         {{ directory: {files:?}, keep_free: 0B }}\n\
         pyroscope:\n  - {{ url: \"http://127.0.0.1:{port}\", max_profile: 64KiB, reach: {{ \
         headers: {{ x-scope-orgid: team-a }} }} }}\n\
         selection: {{ only: [{{ command: spin }}] }}\nspool: \
         {{ directory: {:?}, keep_free: 0B }}\ntelemetry: {{ listen: null }}\nlimits: \
         {{ kill_switch: {:?} }}\n",
        scratch.path("spool"),
        scratch.path("run/off"),
    );
    std::fs::write(&config, text).unwrap();
    let app = Workload::native("spin", &[]).unwrap().start().unwrap();
    let daemon = Recording::spawn(command(["daemon", "--config"]).arg(&config)).unwrap();
    let spin = ("spin".to_owned(), "cpu".to_owned());
    wait_until("pushes of the service", SLACK, || {
        let taken = taken.lock().unwrap();
        (taken.pushes > 5 && taken.totals.contains_key(&spin)).then_some(())
    })
    .unwrap_or_else(|error| {
        panic!("{error}: {:?}\n{}", taken.lock().unwrap().wrong, daemon.progress())
    });
    daemon.signal(rustix::process::Signal::TERM).unwrap();
    let outcome = daemon.finish_well(SLACK).unwrap();
    drop(app);
    let taken = taken.lock().unwrap();
    assert_eq!(taken.wrong, [""; 0], "{}", outcome.stderr);
    let mut expected = Totals::new();
    for service in std::fs::read_dir(&files).unwrap().flatten() {
        let name = service.file_name().to_string_lossy().into_owned();
        for file in std::fs::read_dir(service.path()).into_iter().flatten().flatten() {
            if file.path().extension().is_some_and(|ending| ending == "gz") {
                add(
                    &perfusion_pprof::decode(&std::fs::read(file.path()).unwrap()).unwrap(),
                    &name,
                    &mut expected,
                );
            }
        }
    }
    let by_type = |totals: &Totals| {
        let mut sums: BTreeMap<String, i64> = BTreeMap::new();
        for ((_, kind), sum) in totals {
            *sums.entry(kind.clone()).or_default() += sum;
        }
        sums
    };
    // Names of directories are not quite those of services: by type all agree, and so does the one
    // that has the same.
    assert_eq!(by_type(&taken.totals), by_type(&expected), "{}", outcome.stderr);
    assert_eq!(taken.totals[&spin], expected[&spin]);
    // No label of a thread, a process or a wait made more of them.
    let services: BTreeSet<&String> = taken.totals.keys().map(|(service, _)| service).collect();
    let series: Vec<&String> = taken.series.iter().map(|series| &series["service_name"]).collect();
    assert_eq!(series, services.into_iter().collect::<Vec<_>>(), "{:?}", taken.series);
}
