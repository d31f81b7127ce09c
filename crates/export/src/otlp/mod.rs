//! Profiles to anything that speaks OpenTelemetry's protocol: over gRPC or HTTP, one profile per
//! sample type, from a spool of its own.
//!
//! `convert` makes requests of a profile, they wait in the spool packed and ready, `answer` knows
//! what an answer means, and `halve` makes two of one that is longer than the receiver takes.

pub mod answer;
pub mod convert;
pub mod halve;
pub mod proto;

use self::convert::Converter;
use self::proto::any_value::Value;
use self::proto::{ExportProfilesServiceRequest, Resource};
use super::deliver::{DeliveryCounters, LazyDelivery, Remote, SendOutcome};
use super::http::{Client, Version};
use super::parts::RequestSpooler;
use super::receiver::{self, Reach, SpoolOptions};
use super::request_sink::{RequestMaker, RequestSink};
use super::{EncodePermit, FinishedProfile, SinkError};
use crate::quantity::{ByteSize, HumanDuration};
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderName, TE};
use perfusion_host::locked_files;
use perfusion_pprof::PprofError;
use perfusion_pprof::stream::unpacked_bytes;
use prost::Message as _;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::io::{Read as _, Write as _};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

/// Below the URL, for HTTP (`profiles_service_http.yaml`).
const HTTP_PATH: &str = "/v1development/profiles";
/// Below the URL, for gRPC.
const GRPC_PATH: &str =
    "/opentelemetry.proto.collector.profiles.v1development.ProfilesService/Export";
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
    /// Longest request, before compression, 64KiB to 64MiB. Receivers over gRPC take 4MiB unless
    /// told otherwise.
    pub max_request: ByteSize,
    /// For one attempt.
    pub timeout: HumanDuration,
    /// Headers, tokens, certificates.
    pub reach: Reach,
}

impl Default for OtlpOptions {
    fn default() -> Self {
        Self {
            url: String::new(),
            protocol: Protocol::default(),
            max_request: ByteSize(4 << 20),
            timeout: HumanDuration(Duration::from_secs(10)),
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
pub type Otlp = RequestSink<OtlpRequests>;

/// Makes OpenTelemetry's requests.
pub struct OtlpRequests;

impl RequestSink<OtlpRequests> {
    /// Sets it up. What an earlier daemon left is sent when the first window is over: until then
    /// the sink whose place this one takes may still be at work in the same spool.
    ///
    /// # Errors
    /// When the settings cannot be used. A receiver that is away is no error.
    pub fn open(options: &OtlpOptions, spool: &SpoolOptions) -> Result<Self, SinkError> {
        let (client, directory) =
            receiver::open("otlp", &options.url, &options.reach, options.version(), spool)?;
        let name = format!("otlp {}", options.place());
        let receiver = Receiver { client, protocol: options.protocol };
        let delivery =
            LazyDelivery::new(&name, directory, spool.limits(), options.timeout.0, receiver);
        let most_bytes = usize::try_from(options.max_request.0).unwrap_or(usize::MAX);
        let outgoing = RequestSpooler::new(delivery, most_bytes, "request");
        Ok(Self::new(name, outgoing, OtlpRequests))
    }
}

impl RequestMaker for OtlpRequests {
    fn make(
        &mut self,
        outgoing: &mut RequestSpooler,
        finished: &FinishedProfile,
        first: u64,
    ) -> Result<(), SinkError> {
        let at = finished.start + finished.duration;
        let Some(tables) = outgoing.tables(finished, first, at)? else { return Ok(()) };
        let bounds = outgoing.bounds(usize::MAX);
        let converter = Converter::new(finished, &tables, bounds, fresh_id);
        outgoing.put(finished, first, at, (converter, bounds), |request| pack(&request))
    }

    fn counter(&self, delivered: &DeliveryCounters) -> (&'static str, u64) {
        ("profiles_rejected", delivered.rejected_profiles)
    }
}

fn pack(request: &ExportProfilesServiceRequest) -> Result<Vec<u8>, SinkError> {
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    packed.write_all(&request.encode_to_vec()).map_err(PprofError::from)?;
    Ok(packed.finish().map_err(PprofError::from)?)
}

/// For deduplication by receivers: the spool keeps it, so a request that is sent twice has it
/// twice.
fn fresh_id() -> [u8; 16] {
    let mut id = [0; 16];
    let (left, right) = id.split_at_mut(8);
    left.copy_from_slice(&locked_files::random().unwrap_or_default().to_be_bytes());
    right.copy_from_slice(&locked_files::random().unwrap_or_default().to_be_bytes());
    id
}

struct Receiver {
    client: Client,
    protocol: Protocol,
}

/// Of a request, whose it is; all else is skipped.
#[derive(Clone, PartialEq, prost::Message)]
struct Whose {
    #[prost(message, repeated, tag = "1")]
    resource_profiles: Vec<WhoseProfiles>,
}

/// Likewise.
#[derive(Clone, PartialEq, prost::Message)]
struct WhoseProfiles {
    #[prost(message, optional, tag = "1")]
    resource: Option<Resource>,
}

fn unpacked(payload: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    // What was spooled by us is within this; anything else is not worth the memory.
    GzDecoder::new(payload).take(*REQUEST_BYTES.end()).read_to_end(&mut bytes).ok().map(|_| bytes)
}

fn service(payload: &[u8]) -> Option<String> {
    let whose = Whose::decode(unpacked(payload)?.as_slice()).ok()?;
    let attributes = whose
        .resource_profiles
        .into_iter()
        .filter_map(|of| of.resource)
        .flat_map(|of| of.attributes);
    let name = attributes.into_iter().find(|attribute| attribute.key == "service.name")?;
    match name.value?.value? {
        Value::StringValue(text) => Some(text),
        _ => None,
    }
}

impl Remote for Receiver {
    fn send(&mut self, payload: &[u8], deadline: &dyn Fn() -> Instant) -> SendOutcome {
        let answer = match self.protocol {
            Protocol::Http => {
                let headers =
                    [(CONTENT_TYPE, "application/x-protobuf"), (CONTENT_ENCODING, "gzip")];
                self.client
                    .post(HTTP_PATH, &headers, payload.to_vec(), deadline)
                    .map(|got| answer::http(&got))
            }
            Protocol::Grpc => {
                let headers = [
                    (CONTENT_TYPE, "application/grpc+proto"),
                    (TE, "trailers"),
                    (GRPC_ENCODING, "gzip"),
                ];
                let framed = answer::frame(payload);
                self.client
                    .post(GRPC_PATH, &headers, framed, deadline)
                    .map(|got| answer::grpc(&got))
            }
        };
        answer.unwrap_or_else(|error| receiver::unreached(&error))
    }

    fn service(&self, payload: &[u8]) -> String {
        service(payload).unwrap_or_default()
    }

    fn raw_bytes(&self, payload: &[u8]) -> usize {
        unpacked_bytes(payload)
    }

    fn split(&self, payload: &[u8]) -> Vec<Vec<u8>> {
        let _one = EncodePermit::next();
        let unpacked = unpacked(payload).unwrap_or_default();
        let Ok(request) = ExportProfilesServiceRequest::decode(unpacked.as_slice()) else {
            return Vec::new();
        };
        drop(unpacked);
        let halves = halve::halve(&request, fresh_id);
        let packed: Result<Vec<Vec<u8>>, SinkError> = halves.iter().map(pack).collect();
        packed.unwrap_or_default()
    }
}
