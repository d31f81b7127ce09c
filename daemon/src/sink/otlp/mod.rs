//! Profiles to anything that speaks OpenTelemetry's protocol: over gRPC or HTTP, one profile per sample type, from a spool of its own.
//!
//! `convert` makes requests of a profile, they wait in the spool packed and ready, `answer` knows what an answer means.

pub mod answer;
pub mod convert;
pub mod proto;

use self::proto::ExportProfilesServiceRequest;
use super::deliver::{Backlog, Lazy, Remote, Verdict};
use super::http::{Client, Version};
use super::receiver::{self, Reach, SpoolOptions};
use super::{Finished, Sink, SinkError, unpacking};
use crate::config::units::{Bytes, Span};
use crate::leftover;
use crate::pprof::PprofError;
use flate2::Compression;
use flate2::write::GzEncoder;
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderName, TE};
use prost::Message as _;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::io::Write as _;
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::{Duration, Instant};

/// Below the URL, for HTTP (`profiles_service_http.yaml`).
const HTTP_PATH: &str = "/v1development/profiles";
/// Below the URL, for gRPC.
const GRPC_PATH: &str = "/opentelemetry.proto.collector.profiles.v1development.ProfilesService/Export";
const GRPC_ENCODING: HeaderName = HeaderName::from_static("grpc-encoding");

/// Longest requests that make sense: shorter ones hold no stack, longer ones no receiver takes.
const REQUEST_BYTES: RangeInclusive<u64> = 64 << 10..=64 << 20;

/// How requests travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// Usually port 4317.
    #[default]
    Grpc,
    /// Usually port 4318.
    Http,
}

/// A receiver of OpenTelemetry's profiles.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(extend("required" = ["url"]))]
pub struct OtlpOptions {
    /// `http://` or `https://`, host and port; the path of the service is put behind it.
    pub url: String,
    /// grpc or http.
    pub protocol: Protocol,
    /// Longest request, before compression, 64KiB to 64MiB. Receivers over gRPC take 4MiB unless told otherwise.
    pub max_request: Bytes,
    /// For one attempt.
    pub timeout: Span,
    /// Headers, tokens, certificates.
    pub reach: Reach,
}

impl Default for OtlpOptions {
    fn default() -> Self {
        Self {
            url: String::new(),
            protocol: Protocol::default(),
            max_request: Bytes(4 << 20),
            timeout: Span(Duration::from_secs(10)),
            reach: Reach::default(),
        }
    }
}

impl OtlpOptions {
    /// Where it is, for messages and for telling two of them apart.
    #[must_use]
    pub fn place(&self) -> &str {
        receiver::place(&self.url)
    }

    /// Of HTTP.
    #[must_use]
    pub fn version(&self) -> Version {
        match self.protocol {
            Protocol::Grpc => Version::Two,
            Protocol::Http => Version::One,
        }
    }

    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// What was expected and found.
    pub fn check(&self) -> Result<(), String> {
        self.reach.settings(&self.url)?;
        if !REQUEST_BYTES.contains(&self.max_request.0) {
            return Err(format!(
                "{}: max_request: expected 64KiB to 64MiB, found {}",
                self.url, self.max_request
            ));
        }
        Ok(())
    }
}

/// The sink.
pub struct Otlp {
    name: String,
    most_bytes: usize,
    delivery: Lazy,
    requests: u64,
    dropped_samples: u64,
}

impl Otlp {
    /// Sets it up. What an earlier daemon left is sent when the first window is over: until then the sink whose place this one takes may still be at
    /// work in the same spool.
    ///
    /// # Errors
    /// When the settings cannot be used. A receiver that is away is no error.
    pub fn open(options: &OtlpOptions, spool: &SpoolOptions) -> Result<Self, SinkError> {
        let (client, directory) =
            receiver::open("otlp", &options.url, &options.reach, options.version(), spool)?;
        let name = format!("otlp {}", options.place());
        let receiver = Receiver { sink: name.clone(), client, protocol: options.protocol };
        Ok(Self {
            delivery: Lazy::new(&name, directory, spool.limits(), options.timeout.0, receiver),
            name,
            most_bytes: usize::try_from(options.max_request.0).unwrap_or(usize::MAX),
            requests: 0,
            dropped_samples: 0,
        })
    }
}

impl Sink for Otlp {
    fn name(&self) -> &str {
        &self.name
    }

    fn place(&self) -> &Path {
        self.delivery.directory()
    }

    fn put(&mut self, finished: &Finished) -> Result<(), SinkError> {
        let one = unpacking();
        let converted = convert::requests(finished, self.most_bytes, &mut fresh_id)?;
        self.dropped_samples += converted.dropped_samples;
        let packed = |request: ExportProfilesServiceRequest| {
            let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
            packed.write_all(&request.encode_to_vec()).map_err(PprofError::from)?;
            Ok(packed.finish().map_err(PprofError::from)?)
        };
        let requests: Vec<Result<Vec<u8>, SinkError>> = converted.requests.into_iter().map(packed).collect();
        // Before the disk is waited for.
        drop(one);
        let spooled = receiver::each(requests, |request| {
            let request = request?;
            self.requests += 1;
            Ok(self.delivery.put(finished.start + finished.duration, &request)?)
        });
        spooled.and(receiver::all_fitted(converted.dropped_samples, "request", self.most_bytes))
    }

    fn window_over(&mut self) {
        self.delivery.take_up();
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let figures = self.delivery.figures();
        let mut counters = figures.counters(self.requests).to_vec();
        counters.push(("profiles_rejected", figures.rejected_profiles));
        counters.push(("samples_too_long", self.dropped_samples));
        counters
    }

    fn backlog(&self) -> Option<Backlog> {
        Some(self.delivery.backlog())
    }

    fn close(&mut self, deadline: Instant) {
        self.delivery.close(deadline);
    }
}

/// For deduplication by receivers: the spool keeps it, so a request that is sent twice has it twice.
fn fresh_id() -> [u8; 16] {
    let mut id = [0; 16];
    let (left, right) = id.split_at_mut(8);
    left.copy_from_slice(&leftover::random().unwrap_or_default().to_be_bytes());
    right.copy_from_slice(&leftover::random().unwrap_or_default().to_be_bytes());
    id
}

struct Receiver {
    /// What messages call it.
    sink: String,
    client: Client,
    protocol: Protocol,
}

impl Remote for Receiver {
    fn send(&mut self, payload: &[u8], deadline: &dyn Fn() -> Instant) -> Verdict {
        let answer = match self.protocol {
            Protocol::Http => {
                let headers = [(CONTENT_TYPE, "application/x-protobuf"), (CONTENT_ENCODING, "gzip")];
                self.client
                    .post(HTTP_PATH, &headers, payload.to_vec(), deadline)
                    .map(|got| answer::http(&got, &self.sink))
            }
            Protocol::Grpc => {
                let headers =
                    [(CONTENT_TYPE, "application/grpc+proto"), (TE, "trailers"), (GRPC_ENCODING, "gzip")];
                let framed = answer::frame(payload);
                self.client
                    .post(GRPC_PATH, &headers, framed, deadline)
                    .map(|got| answer::grpc(&got, &self.sink))
            }
        };
        answer.unwrap_or_else(receiver::unreached)
    }
}
