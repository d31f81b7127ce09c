//! Profiles to Pyroscope by its push service (`push.v1.PusherService`, a Connect service over
//! HTTP/1.1): raw pprof with all sample types, under the labels of a series, split so that no part
//! is longer than the server takes, from a spool of its own.
//!
//! The server makes a series of each set of texts that label samples (grafana/pyroscope,
//! pkg/model/pprofsplit, `VisitSampleSeries`), and checks its names as it does those of the series,
//! so samples go there with few labels and plain names.

use super::deliver::{DeliveryCounters, LazyDelivery, Remote, SendOutcome};
use super::http::{Client, HttpResponse, Version};
use super::parts::RequestSpooler;
use super::receiver::{self, Reach, SpoolOptions, retry_after, said, speaks_of_size};
use super::request_sink::{RequestMaker, RequestSink};
use super::spool::SpoolLimits;
use super::{EncodePermit, FinishedProfile, SinkError};
use crate::quantity::{ByteSize, HumanDuration};
use hyper::header::{CONTENT_TYPE, HeaderName};
use perfusion_pprof::proto::Profile;
use perfusion_pprof::split::{CarriedLabels, PartBounds, Splitter};
use perfusion_pprof::stream::unpacked_bytes;
use prost::Message;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

/// Below the URL: Connect's path of a service's method.
const PATH: &str = "/push.v1.PusherService/Push";
/// Connect's own header; a server may insist on it.
const PROTOCOL: HeaderName = HeaderName::from_static("connect-protocol-version");
/// The server's limits unless its operator changed them (grafana/pyroscope,
/// pkg/validation/limits.go): a profile of 4 MiB before compression and of 16,000 samples, 30
/// labels of a series with names of 1,024 and values of 2,048 bytes, nothing older than an hour.
const PROFILE_BYTES: RangeInclusive<u64> = 64 << 10..=64 << 20;
/// Less than those 4 MiB: a profile and the labels of its series together count against a burst of
/// 2 MiB a tenant (`ingestion_burst_size_mb`; pkg/distributor, `rateLimit`), and what alone is more
/// is told to try again later, for ever. 30 labels are 90 KiB at most.
const BURST_BYTES: u64 = 1920 << 10;
const MOST_SAMPLES: usize = 16_000;
const MOST_LABELS: usize = 30;
const MOST_NAME_BYTES: usize = 1024;
const MOST_VALUE_BYTES: usize = 2048;
/// A profile's age is the server's measure, from its window's start, less what clocks differ by and
/// sending takes.
pub const MOST_AGE: Duration = Duration::from_secs(3600 - 120);
/// What the profile's types are found under in the server's list:
/// `perfusion:cpu:nanoseconds:cpu:nanoseconds`.
const NAME: &str = "perfusion";
/// The label of a series that has the service's name.
const SERVICE: &str = "service_name";
/// What a pod's samples have that a series may be made of (`kubernetes::pods`).
const POD: [&str; 3] = ["k8s.namespace.name", "k8s.pod.name", "k8s.container.name"];

/// `push.v1.PushRequest`.
#[derive(Clone, PartialEq, Message)]
pub struct PushRequest {
    /// One for each set of labels.
    #[prost(message, repeated, tag = "1")]
    pub series: Vec<RawProfileSeries>,
}

/// `push.v1.RawProfileSeries`.
#[derive(Clone, PartialEq, Message)]
pub struct RawProfileSeries {
    /// Sorted by name.
    #[prost(message, repeated, tag = "1")]
    pub labels: Vec<LabelPair>,
    /// The profiles.
    #[prost(message, repeated, tag = "2")]
    pub samples: Vec<RawSample>,
}

/// `types.v1.LabelPair`.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct LabelPair {
    /// `[a-zA-Z_][a-zA-Z0-9_]*`.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Not empty.
    #[prost(string, tag = "2")]
    pub value: String,
}

/// `push.v1.RawSample`.
#[derive(Clone, PartialEq, Message)]
pub struct RawSample {
    /// A pprof, gzipped.
    #[prost(bytes = "vec", tag = "1")]
    pub raw_profile: Vec<u8>,
}

/// A Pyroscope server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(extend("required" = ["url"]))]
pub struct PyroscopeOptions {
    /// `http://` or `https://`, host and port, and the path the server lies below, if any.
    pub url: String,
    /// Longest profile, before compression, 64KiB to 64MiB: of more than its
    /// `ingestion_burst_size_mb`, 2MiB unless told otherwise, a server takes nothing.
    pub max_profile: ByteSize,
    /// Labels of samples that the server gets, by the names they have in the profile; each set of
    /// their values is a series there. All others are left out.
    pub sample_labels: Vec<String>,
    /// For one attempt.
    pub timeout: HumanDuration,
    /// Headers, tokens, certificates. The tenant is the header `x-scope-orgid`.
    pub reach: Reach,
}

impl Default for PyroscopeOptions {
    fn default() -> Self {
        Self {
            url: String::new(),
            max_profile: ByteSize(BURST_BYTES),
            sample_labels: POD.map(str::to_owned).to_vec(),
            timeout: HumanDuration(Duration::from_secs(10)),
            reach: Reach::default(),
        }
    }
}

impl PyroscopeOptions {
    /// Where it is, for messages and for telling two of them apart.
    #[must_use]
    pub fn place(&self) -> &str {
        receiver::place(&self.url)
    }

    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// What was expected and found.
    pub fn check(&self) -> Result<(), String> {
        self.reach.settings(&self.url)?;
        if !PROFILE_BYTES.contains(&self.max_profile.0) {
            return Err(format!(
                "{}: max_profile: expected 64KiB to 64MiB, found {}",
                self.url, self.max_profile
            ));
        }
        let wrong = |found: String| {
            Err(format!(
                "{}: sample_labels: expected names of labels, each once, found {found}",
                self.url
            ))
        };
        for (at, name) in self.sample_labels.iter().enumerate() {
            if name.is_empty() {
                return wrong("an empty one".to_owned());
            }
            if let Some(other) =
                self.sample_labels.iter().take(at).find(|other| plain(other) == plain(name))
            {
                return wrong(format!("`{other}` and `{name}`, which are one to the server"));
            }
        }
        Ok(())
    }
}

/// The sink.
pub type Pyroscope = RequestSink<PyroscopeRequests>;

/// Makes pushes of profiles.
pub struct PyroscopeRequests {
    sample_labels: Vec<String>,
    /// An older profile is not sent.
    age: Duration,
    /// Labels that found no room.
    dropped_labels: u64,
}

impl RequestSink<PyroscopeRequests> {
    /// Sets it up; as for OpenTelemetry's receivers, what an earlier daemon left is sent when the
    /// first window is over.
    ///
    /// # Errors
    /// When the settings cannot be used. A server that is away is no error.
    pub fn open(options: &PyroscopeOptions, spool: &SpoolOptions) -> Result<Self, SinkError> {
        let (client, directory) =
            receiver::open("pyroscope", &options.url, &options.reach, Version::One, spool)?;
        Ok(Self::with(options, spool.limits(), directory, PyroscopeServer(client)))
    }

    fn with(
        options: &PyroscopeOptions,
        limits: SpoolLimits,
        directory: PathBuf,
        server: impl Remote,
    ) -> Self {
        let limits = SpoolLimits { age: limits.age.min(MOST_AGE), ..limits };
        let name = format!("pyroscope {}", options.place());
        let delivery = LazyDelivery::new(&name, directory, limits, options.timeout.0, server);
        let most_bytes = usize::try_from(options.max_profile.0).unwrap_or(usize::MAX);
        let outgoing = RequestSpooler::new(delivery, most_bytes, "profile");
        let sample_labels = options.sample_labels.clone();
        let requests = PyroscopeRequests { sample_labels, age: limits.age, dropped_labels: 0 };
        Self::new(name, outgoing, requests)
    }
}

impl RequestMaker for PyroscopeRequests {
    fn make(
        &mut self,
        outgoing: &mut RequestSpooler,
        finished: &FinishedProfile,
        first: u64,
    ) -> Result<(), SinkError> {
        let at = aged_from(finished, self.age);
        let Some(tables) = outgoing.tables(finished, first, at)? else { return Ok(()) };
        let (labels, dropped) = labels(finished);
        let (names, dropped_of_samples) = sample_labels(&self.sample_labels, &labels, &tables);
        let kept = CarriedLabels { names: &names, cut: |value| cut(value, MOST_VALUE_BYTES) };
        let bounds = outgoing.bounds(MOST_SAMPLES);
        let splitter = Splitter::new(&tables, bounds, kept);
        outgoing.put(finished, first, at, (splitter, bounds), |part| request(&labels, &part))?;
        self.dropped_labels += dropped + dropped_of_samples;
        Ok(())
    }

    fn counter(&self, _: &DeliveryCounters) -> (&'static str, u64) {
        ("labels_too_many", self.dropped_labels)
    }
}

fn request(labels: &[LabelPair], part: &Profile) -> Result<Vec<u8>, SinkError> {
    let samples = vec![RawSample { raw_profile: perfusion_pprof::pack(part)? }];
    let series = vec![RawProfileSeries { labels: labels.to_vec(), samples }];
    Ok(PushRequest { series }.encode_to_vec())
}

/// What the spool measures the age from: the window's end, as for all receivers, but so that
/// nothing is sent that the server finds too old. Each that it refused would be followed by a
/// longer wait, in which the next grows too old.
fn aged_from(finished: &FinishedProfile, age: Duration) -> SystemTime {
    (finished.start + finished.duration).min(finished.start + MOST_AGE.saturating_sub(age))
}

/// The beginning of the text, of so many bytes at most.
fn cut(text: &str, bytes: usize) -> &str {
    let end = (0..=bytes.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
    text.get(..end.unwrap_or(0)).unwrap_or_default()
}

/// The name as the server takes it. Names of OpenTelemetry's have dots.
fn plain(name: &str) -> String {
    let digit = if name.starts_with(|first: char| first.is_ascii_digit()) { "_" } else { "" };
    let letters =
        name.chars().map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '_' });
    cut(&digit.chars().chain(letters).collect::<String>(), MOST_NAME_BYTES).to_owned()
}

/// What the server knows those labels of samples as that it gets, and how many found no room beside
/// the series' own. Of a name that the series has, too, the server would take no notice.
fn sample_labels<'a>(
    wanted: &'a [String],
    series: &[LabelPair],
    profile: &Profile,
) -> (BTreeMap<&'a str, String>, u64) {
    let (mut kept, mut dropped) = (BTreeMap::new(), 0);
    for name in wanted.iter().filter(|name| profile.string_table.contains(name)) {
        let plain = plain(name);
        if series.iter().any(|label| label.name == plain) {
            continue;
        }
        if series.len() + kept.len() < MOST_LABELS {
            kept.insert(name.as_str(), plain);
        } else {
            dropped += 1;
        }
    }
    (kept, dropped)
}

/// The labels of a series, and how many found no room.
fn labels(finished: &FinishedProfile) -> (Vec<LabelPair>, u64) {
    let mut all: BTreeMap<String, String> = BTreeMap::new();
    all.insert("__name__".to_owned(), NAME.to_owned());
    all.insert(SERVICE.to_owned(), cut(&finished.service, MOST_VALUE_BYTES).to_owned());
    let mut dropped = 0;
    for (name, value) in
        finished.labels.iter().filter(|(name, value)| !name.is_empty() && !value.is_empty())
    {
        let name = plain(name);
        if all.contains_key(&name) || all.len() >= MOST_LABELS {
            dropped += 1;
        } else {
            all.insert(name, cut(value, MOST_VALUE_BYTES).to_owned());
        }
    }
    (all.into_iter().map(|(name, value)| LabelPair { name, value }).collect(), dropped)
}

struct PyroscopeServer(Client);

impl Remote for PyroscopeServer {
    fn send(&mut self, payload: &[u8], deadline: &dyn Fn() -> Instant) -> SendOutcome {
        let headers = [(CONTENT_TYPE, "application/proto"), (PROTOCOL, "1")];
        match self.0.post(PATH, &headers, payload.to_vec(), deadline) {
            Ok(answer) => verdict(&answer),
            Err(error) => receiver::unreached(&error),
        }
    }

    fn service(&self, payload: &[u8]) -> String {
        let series = PushRequest::decode(payload).unwrap_or_default().series;
        let mut labels = series.into_iter().flat_map(|series| series.labels);
        labels.find(|label| label.name == SERVICE).map_or_else(String::new, |label| label.value)
    }

    fn raw_bytes(&self, payload: &[u8]) -> usize {
        let series = PushRequest::decode(payload).unwrap_or_default().series;
        let samples = series.iter().flat_map(|series| &series.samples);
        samples.map(|sample| unpacked_bytes(&sample.raw_profile)).sum()
    }

    fn split(&self, payload: &[u8]) -> Vec<Vec<u8>> {
        let _one = EncodePermit::next();
        halves(payload).unwrap_or_default()
    }
}

/// A push of one profile -> two that have half of its samples each; none where it has one sample.
fn halves(payload: &[u8]) -> Result<Vec<Vec<u8>>, SinkError> {
    let push = PushRequest::decode(payload).map_err(perfusion_pprof::PprofError::from)?;
    let [series] = push.series.as_slice() else { return Ok(Vec::new()) };
    let [sample] = series.samples.as_slice() else { return Ok(Vec::new()) };
    let whole = perfusion_pprof::unpack(&sample.raw_profile)?;
    if whole.sample.len() < 2 {
        return Ok(Vec::new());
    }
    let keys = whole.sample.iter().flat_map(|sample| &sample.label).map(|label| label.key);
    let texts = keys.filter_map(|key| whole.string_table.get(usize::try_from(key).ok()?));
    let names: BTreeMap<&str, String> = texts.map(|name| (name.as_str(), name.clone())).collect();
    let (first, second) = whole.sample.split_at(whole.sample.len() / 2);
    [first, second]
        .into_iter()
        .map(|samples| {
            let all = PartBounds { samples: usize::MAX, bytes: usize::MAX, lone_bytes: usize::MAX };
            let mut splitter =
                Splitter::new(&whole, all, CarriedLabels { names: &names, cut: |value| value });
            for sample in samples {
                // All fit into one.
                splitter.add(sample);
            }
            request(&series.labels, &splitter.finish().0.unwrap_or_default())
        })
        .collect()
}

/// Connect answers a request in the type it came in (connectrpc.com/docs/protocol,
/// "Unary-Response").
fn is_of_the_protocol(answer: &HttpResponse) -> bool {
    answer
        .headers
        .get(CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"application/proto"))
}

/// Connect's codes are HTTP's (connectrpc.com/docs/protocol, "Error codes"): 429 is exhausted, 503
/// unavailable, 504 too late. A 500 is the server's own fault, which may pass, or what it says of a
/// profile that it cannot cope with; what it does not take for good is 400, 401, 403, 404, 413,
/// 501.
fn verdict(answer: &HttpResponse) -> SendOutcome {
    match answer.status {
        200..=299 if is_of_the_protocol(answer) => {
            SendOutcome::Accepted { rejected: 0, remark: None }
        }
        // A page to log in at, or another service behind the same address.
        200..=299 => {
            let found = answer
                .headers
                .get(CONTENT_TYPE)
                .map_or("no type", |kind| kind.to_str().unwrap_or("another"));
            let reason = format!(
                "{} with {found}: expected application/proto, as Pyroscope answers; is the URL \
                 right?",
                answer.status
            );
            SendOutcome::Later { after: None, reason }
        }
        500 => SendOutcome::Failed(said(answer)),
        408 | 429 | 502 | 503 | 504 => {
            SendOutcome::Later { after: retry_after(&answer.headers), reason: said(answer) }
        }
        413 => SendOutcome::TooLarge(said(answer)),
        400 | 422 if speaks_of_size(&answer.body) => SendOutcome::TooLarge(said(answer)),
        400 | 409 | 411 | 422 => SendOutcome::Refused(said(answer)),
        _ => SendOutcome::Denied(said(answer)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Sink;
    use crate::deliver::SpoolBacklog;
    use crate::spool::Spool;
    use hyper::body::Bytes as Body;
    use hyper::header::{HeaderMap, HeaderValue, RETRY_AFTER};
    use perfusion_pprof::proto::{Label, Sample};
    use std::sync::mpsc::{Sender, channel};

    fn finished(names: &[(&str, &str)]) -> FinishedProfile {
        FinishedProfile {
            service: "é".repeat(1025).as_str().into(),
            labels: names
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
            start: SystemTime::UNIX_EPOCH,
            duration: Duration::from_secs(60),
            profile: Profile::default().into(),
        }
    }

    #[test]
    fn labels_are_what_the_server_takes() {
        let (all, dropped) = labels(&finished(&[
            ("host.name", "node-1"),
            ("host_name", "other"),
            ("1st", "x"),
            ("none", ""),
        ]));
        let of = |name: &str| {
            all.iter().find(|label| label.name == name).map(|label| label.value.as_str())
        };
        assert_eq!(
            (of("__name__"), of("host_name"), of("_1st")),
            (Some("perfusion"), Some("node-1"), Some("x"))
        );
        assert_eq!((of("service_name").map(str::len), dropped), (Some(2048), 1));
        assert!(all.windows(2).all(|pair| pair[0].name < pair[1].name), "{all:?}");
        let many: Vec<String> = (0..40).map(|number| format!("label{number}")).collect();
        let many: Vec<(&str, &str)> = many.iter().map(|name| (name.as_str(), "x")).collect();
        let (all, dropped) = labels(&finished(&many));
        assert_eq!((all.len(), dropped), (MOST_LABELS, 12));
    }

    #[test]
    fn of_samples_those_labels_are_kept_that_are_asked_for_and_find_room_beside_the_series() {
        let wanted = ["k8s.pod.name", "host.name", "absent", "x"].map(str::to_owned);
        let string_table =
            ["", "k8s.pod.name", "host.name", "thread_name", "x"].map(str::to_owned).to_vec();
        let profile = Profile { string_table, ..Profile::default() };
        let (few, _) = labels(&finished(&[("host.name", "node-1")]));
        let expected =
            BTreeMap::from([("k8s.pod.name", "k8s_pod_name".to_owned()), ("x", "x".to_owned())]);
        assert_eq!(sample_labels(&wanted, &few, &profile), (expected, 0));
        let many: Vec<String> = (0..27).map(|number| format!("label{number}")).collect();
        let many: Vec<(&str, &str)> = many.iter().map(|name| (name.as_str(), "x")).collect();
        let (kept, dropped) = sample_labels(&wanted, &labels(&finished(&many)).0, &profile);
        assert_eq!((kept.into_keys().collect::<Vec<_>>(), dropped), (vec!["k8s.pod.name"], 2));
    }

    #[test]
    fn names_of_sample_labels_that_are_one_to_the_server_are_told() {
        let of = |names: &[&str]| PyroscopeOptions {
            url: "http://a".to_owned(),
            sample_labels: names.iter().map(|name| (*name).to_owned()).collect(),
            ..PyroscopeOptions::default()
        };
        assert_eq!((of(&POD).check(), of(&[]).check()), (Ok(()), Ok(())));
        let error = of(&["k8s.pod.name", "x", "k8s_pod_name"]).check().unwrap_err();
        assert!(error.contains("found `k8s.pod.name` and `k8s_pod_name`"), "{error}");
        assert!(of(&[""]).check().unwrap_err().contains("found an empty one"));
    }

    struct Takes(Sender<Vec<u8>>);

    impl Remote for Takes {
        fn send(&mut self, payload: &[u8], _: &dyn Fn() -> Instant) -> SendOutcome {
            self.0.send(payload.to_vec()).unwrap();
            SendOutcome::Accepted { rejected: 0, remark: None }
        }
    }

    #[test]
    fn what_the_server_finds_too_old_is_not_sent() {
        let directory = tempfile::tempdir().unwrap();
        let (taken, sent) = channel();
        let limits =
            SpoolLimits { bytes: 1 << 20, age: Duration::from_secs(86_400), free_bytes: 0 };
        let options = PyroscopeOptions::default();
        let mut sink = Pyroscope::with(&options, limits, directory.path().to_owned(), Takes(taken));
        let now = SystemTime::now();
        let profile = Profile { sample: vec![Sample::default()], ..Profile::default() };
        // The first one's end is young enough, its start is not.
        for (service, ago) in [("old", 3590), ("new", 3000)] {
            let start = now - Duration::from_secs(ago);
            let profile = profile.clone();
            sink.put(&FinishedProfile {
                service: service.into(),
                start,
                profile: profile.into(),
                ..finished(&[])
            })
            .unwrap();
        }
        let request = PushRequest::decode(sent.recv().unwrap().as_slice()).unwrap();
        assert!(request.series[0].labels.iter().any(|label| label.value == "new"), "{request:?}");
        sink.close(Instant::now() + Duration::from_secs(60));
        assert!(sent.try_recv().is_err());
        assert!(sink.counters().contains(&("requests_expired", 1)), "{:?}", sink.counters());
    }

    #[test]
    fn halves_of_a_push_have_its_samples_and_labels_between_them() {
        let sample = |value| Sample {
            value: vec![value],
            label: vec![Label { key: 1, str: 2, ..Label::default() }],
            ..Sample::default()
        };
        let mut whole = Profile {
            string_table: ["", "pod", "web-1"].map(str::to_owned).to_vec(),
            sample: (1..=5_i64)
                .map(|value| Sample { location_id: vec![value.cast_unsigned()], ..sample(value) })
                .collect(),
            ..Profile::default()
        };
        whole.location = (1..=5)
            .map(|id| perfusion_pprof::proto::Location { id, ..Default::default() })
            .collect();
        let pushed = request(&labels(&finished(&[])).0, &whole).unwrap();
        let parts = halves(&pushed).unwrap();
        let found: Vec<Profile> = parts
            .iter()
            .map(|part| {
                let push = PushRequest::decode(part.as_slice()).unwrap();
                assert!(push.series[0].labels.iter().any(|label| label.name == SERVICE));
                perfusion_pprof::unpack(&push.series[0].samples[0].raw_profile).unwrap()
            })
            .collect();
        let values: Vec<i64> =
            found.iter().flat_map(|part| &part.sample).map(|sample| sample.value[0]).collect();
        assert_eq!((parts.len(), values), (2, vec![1, 2, 3, 4, 5]));
        assert!(found.iter().all(|part| part.sample.iter().all(|sample| sample.label.len() == 1)));
        let lone = Profile { sample: vec![sample(1)], ..whole };
        let one = request(&labels(&finished(&[])).0, &lone).unwrap();
        assert_eq!(halves(&one).unwrap(), Vec::<Vec<u8>>::new());
    }

    #[test]
    fn what_an_earlier_daemon_left_is_sent_when_a_window_is_over() {
        let directory = tempfile::tempdir().unwrap();
        let limits = SpoolLimits { bytes: 1 << 20, age: MOST_AGE, free_bytes: 0 };
        Spool::open(directory.path(), limits).unwrap().put(SystemTime::now(), b"left").unwrap();
        let (taken, sent) = channel();
        let options = PyroscopeOptions::default();
        let mut sink = Pyroscope::with(&options, limits, directory.path().to_owned(), Takes(taken));
        sink.window_over();
        assert_eq!(sent.recv().unwrap(), b"left");
        sink.close(Instant::now() + Duration::from_secs(60));
        assert!(sink.counters().contains(&("requests_sent", 1)), "{:?}", sink.counters());
        assert_eq!(sink.backlog(), Some(SpoolBacklog::default()));
    }

    #[test]
    fn age_counts_from_the_end_where_the_start_allows_it() {
        let window = FinishedProfile { duration: Duration::from_secs(600), ..finished(&[]) };
        let from = |age| {
            aged_from(&window, Duration::from_secs(age)).duration_since(window.start).unwrap()
        };
        assert_eq!((from(300), from(3480)), (Duration::from_secs(600), Duration::ZERO));
        assert_eq!(from(3400), Duration::from_secs(80));
    }

    #[test]
    fn what_may_pass_is_tried_again_and_the_rest_is_not() {
        let answer = |status| HttpResponse {
            status,
            headers: HeaderMap::from_iter([(RETRY_AFTER, HeaderValue::from_static("7"))]),
            trailers: HeaderMap::new(),
            body: Body::from_static(b"{\"code\":\"resource_exhausted\"}"),
        };
        let of_type = |kind: &'static str| {
            let mut answer = answer(200);
            answer.headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
            verdict(&answer)
        };
        assert_eq!(
            of_type("application/proto"),
            SendOutcome::Accepted { rejected: 0, remark: None }
        );
        // A page to log in at.
        let SendOutcome::Later { reason, .. } = of_type("text/html; charset=utf-8") else {
            panic!()
        };
        assert!(
            reason.starts_with("200 with text/html; charset=utf-8: expected application/proto"),
            "{reason}"
        );
        let SendOutcome::Later { reason, .. } = verdict(&answer(200)) else { panic!() };
        assert!(reason.contains("no type"), "{reason}");
        let SendOutcome::Failed(reason) = verdict(&answer(500)) else { panic!() };
        assert!(reason.contains("resource_exhausted"), "{reason}");
        for status in [429, 503, 504] {
            let SendOutcome::Later { after, reason } = verdict(&answer(status)) else {
                panic!("{status}")
            };
            assert_eq!(after, Some(Duration::from_secs(7)));
            assert!(reason.contains("resource_exhausted"), "{reason}");
        }
        for status in [301, 401, 403, 404, 501] {
            assert!(matches!(verdict(&answer(status)), SendOutcome::Denied(_)), "{status}");
        }
        for status in [400, 422] {
            assert!(matches!(verdict(&answer(status)), SendOutcome::Refused(_)), "{status}");
        }
        let mut long = answer(400);
        long.body = Body::from_static(b"the profile exceeds the maximum allowed size");
        assert!(matches!(verdict(&long), SendOutcome::TooLarge(_)));
        assert!(matches!(verdict(&answer(413)), SendOutcome::TooLarge(_)));
    }
}
