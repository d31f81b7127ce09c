//! What a process publishes of itself for readers outside: OpenTelemetry's process context (OTEP
//! 4719, format 2), a header of 32 bytes in a mapping called `OTEL_CTX` with a pointer to a
//! protobuf message; and whether its threads publish what they work for (OTEP 4947).
//!
//! The process may write anything there at any time. A copy is accepted if the publishing time is
//! the same before and after it. It is bounded and decides only what the process is called.

use super::memory::ProcessMemory;
use crate::process::handle::ProcessHandle;
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value::Value};
use opentelemetry_proto::tonic::resource::v1::Resource;
use perfusion_model::text::printable;
use perfusion_unwind::TargetMemory;
use prost::Message as _;
use std::sync::Arc;

/// As `/proc/PID/maps` has it: a memfd, and what the kernel was told to call it
/// (`PR_SET_VMA_ANON_NAME`). A memfd has no name in any directory.
const NAMES: [&str; 4] =
    ["/memfd:OTEL_CTX", "/memfd:OTEL_CTX (deleted)", "[anon_shmem:OTEL_CTX]", "[anon:OTEL_CTX]"];
/// Signature, version (u32), size of the payload (u32), time of publishing (u64, zero while it is
/// written), address of the payload (u64).
const HEADER_BYTES: usize = 32;
const SIGNATURE: &[u8; 8] = b"OTEL_CTX";
const VERSION: u32 = 2;
/// Most bytes of a payload; the publishers known have some hundred.
const PAYLOAD_BYTES: usize = 1 << 16;
/// An update takes far less than a microsecond; who is always in the middle of one does not want to
/// be read.
const TRIES: usize = 3;
/// Characters of a value that samples show, at most.
const SHOWN_CHARACTERS: usize = 200;
/// The attributes samples show, beside the name of the service.
const SHOWN: [&str; 4] =
    ["service.namespace", "service.instance.id", "service.version", "deployment.environment.name"];

/// How a process calls itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Published {
    /// `service.name`, as it stands there.
    pub service: Option<String>,
    /// The attributes that samples show, with control characters replaced.
    pub shown: Vec<(&'static str, Arc<str>)>,
    /// Its threads say what they work for, in a variable of their own.
    pub threads: bool,
}

/// Thread context (OTEP 4947): the thread-local pointer to a thread's record.
pub(crate) const THREAD_VARIABLE: &str = "otel_thread_ctx_v1";
/// The attribute that says how threads publish theirs, and what it says for this way: while it was
/// tried, and since.
const THREAD_SCHEMA: &str = "threadlocal.schema_version";
const THREAD_SCHEMAS: [&str; 2] = ["tlsdesc_v1_dev", "tls_v1"];

/// `opentelemetry.proto.processcontext.v1development.ProcessContext`.
#[derive(Clone, PartialEq, prost::Message)]
struct ProcessContext {
    #[prost(message, optional, tag = "1")]
    resource: Option<Resource>,
    #[prost(message, repeated, tag = "2")]
    attributes: Vec<KeyValue>,
}

/// What the process publishes now; `None` when that is nothing, or cannot be read.
#[must_use]
pub(crate) fn read(target: &ProcessHandle) -> Option<Published> {
    let mut at = None;
    target
        .maps(|line| {
            if NAMES.contains(&line.name.as_str()) && line.offset == 0 {
                at = Some(line.start);
            }
            at.is_none()
        })
        .ok()?;
    let at = at?;
    let memory = ProcessMemory::open(target.pid(), target.start_ticks().ok()?)?;
    let payload = memory.with(move |memory| (0..TRIES).find_map(|_| copy(memory, at)))??;
    decode(&payload)
}

/// The payload, if it was whole while it was copied.
fn copy(memory: &dyn TargetMemory, at: u64) -> Option<Vec<u8>> {
    let header = || {
        let mut header = [0; HEADER_BYTES];
        (memory.read(at, &mut header) == HEADER_BYTES).then_some(header)
    };
    let before = header()?;
    let (size, address) = parse(&before)?;
    let mut payload = vec![0; size];
    let whole = memory.read(address, &mut payload) == size;
    (whole && header()? == before).then_some(payload)
}

/// Size and address of the payload.
fn parse(header: &[u8; HEADER_BYTES]) -> Option<(usize, u64)> {
    let (signature, rest) = header.split_first_chunk::<8>()?;
    let (version, rest) = rest.split_first_chunk()?;
    let (size, rest) = rest.split_first_chunk()?;
    let (published_ns, rest) = rest.split_first_chunk()?;
    let address = u64::from_ne_bytes(*rest.first_chunk()?);
    let size = usize::try_from(u32::from_ne_bytes(*size)).ok()?;
    let valid = signature == SIGNATURE
        && u32::from_ne_bytes(*version) == VERSION
        && u64::from_ne_bytes(*published_ns) != 0
        && (1..=PAYLOAD_BYTES).contains(&size);
    valid.then_some((size, address))
}

fn decode(payload: &[u8]) -> Option<Published> {
    let ProcessContext { resource, attributes } = ProcessContext::decode(payload).ok()?;
    let schema =
        attributes.iter().find(|attribute| attribute.key == THREAD_SCHEMA).and_then(text_of);
    let threads = schema.is_some_and(|schema| THREAD_SCHEMAS.contains(&schema));
    let resource = resource.or_else(|| threads.then(Resource::default))?;
    let text = |name: &str| {
        let attribute = resource.attributes.iter().find(|attribute| attribute.key == name)?;
        text_of(attribute).filter(|text| !text.trim().is_empty())
    };
    let shown = SHOWN.iter().filter_map(|name| {
        let value: String = printable(text(name)?).chars().take(SHOWN_CHARACTERS).collect();
        Some((*name, value.into()))
    });
    Some(Published {
        service: text("service.name").map(str::to_owned),
        shown: shown.collect(),
        threads,
    })
}

fn text_of(attribute: &KeyValue) -> Option<&str> {
    match attribute.value.as_ref()?.value.as_ref()? {
        Value::StringValue(text) => Some(text),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::{HEADER_BYTES, ProcessContext, Published, copy, decode, parse, read};
    use crate::process::handle::ProcessHandle;
    use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue, any_value::Value};
    use opentelemetry_proto::tonic::resource::v1::Resource;
    use perfusion_unwind::TargetMemory;
    use prost::Message as _;
    use std::cell::Cell;

    fn header(
        signature: &[u8; 8],
        version: u32,
        size: u32,
        published_ns: u64,
        address: u64,
    ) -> [u8; HEADER_BYTES] {
        let parts: [&[u8]; 5] = [
            signature,
            &version.to_ne_bytes(),
            &size.to_ne_bytes(),
            &published_ns.to_ne_bytes(),
            &address.to_ne_bytes(),
        ];
        parts.concat().try_into().unwrap()
    }

    fn payload(attributes: &[(&str, &str)]) -> Vec<u8> {
        let attributes = attributes.iter().map(|(key, text)| KeyValue {
            key: (*key).to_owned(),
            value: Some(AnyValue { value: Some(Value::StringValue((*text).to_owned())) }),
            ..KeyValue::default()
        });
        let resource = Resource { attributes: attributes.collect(), ..Resource::default() };
        ProcessContext { resource: Some(resource), attributes: Vec::new() }.encode_to_vec()
    }

    /// A header at 0 and a payload at 4096; the header is another one from its `changes`-th reading
    /// on.
    struct Memory {
        header: [u8; HEADER_BYTES],
        payload: Vec<u8>,
        readings: Cell<u64>,
        changes: u64,
    }

    impl TargetMemory for Memory {
        fn read(&self, address: u64, into: &mut [u8]) -> usize {
            let mut from = if address == 0 { self.header.to_vec() } else { self.payload.clone() };
            if address == 0 {
                self.readings.set(self.readings.get() + 1);
                if self.readings.get() >= self.changes {
                    from[16] ^= 1;
                }
            }
            let count = from.len().min(into.len());
            into[..count].copy_from_slice(&from[..count]);
            count
        }
    }

    #[test]
    fn headers_that_are_none_lead_nowhere() {
        assert_eq!(parse(&header(b"OTEL_CTX", 2, 7, 1, 64)), Some((7, 64)));
        for wrong in [
            header(b"otel_ctx", 2, 7, 1, 64),
            header(b"OTEL_CTX", 3, 7, 1, 64),
            header(b"OTEL_CTX", 2, 0, 1, 64),
            header(b"OTEL_CTX", 2, (1 << 16) + 1, 1, 64),
            // It is being written.
            header(b"OTEL_CTX", 2, 7, 0, 64),
        ] {
            assert_eq!(parse(&wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn what_changes_while_it_is_copied_is_not_believed() {
        let payload = payload(&[("service.name", "shop")]);
        let size = u32::try_from(payload.len()).unwrap();
        let memory = |changes| Memory {
            header: header(b"OTEL_CTX", 2, size, 2, 4096),
            payload: payload.clone(),
            readings: Cell::new(0),
            changes,
        };
        assert_eq!(copy(&memory(3), 0), Some(payload.clone()));
        assert_eq!(copy(&memory(2), 0), None);
        let short = Memory { header: header(b"OTEL_CTX", 2, size + 1, 2, 4096), ..memory(3) };
        assert_eq!(copy(&short, 0), None);
    }

    #[test]
    fn names_are_taken_and_nothing_else() {
        let published = decode(&payload(&[
            ("service.name", "shop"),
            ("service.instance.id", "a\u{1b}b"),
            ("service.version", " "),
            ("process.command_args", "--password=x"),
        ]));
        let expected = Published {
            service: Some("shop".to_owned()),
            shown: vec![("service.instance.id", "a\u{fffd}b".into())],
            threads: false,
        };
        assert_eq!(published, Some(expected));
        assert_eq!(decode(&[0xff; 40]), None);
        assert_eq!(decode(&[]), None);
    }

    #[test]
    fn threads_publish_in_a_way_that_is_known_or_not_at_all() {
        let published = |schema: &str| {
            let value = Some(AnyValue { value: Some(Value::StringValue(schema.to_owned())) });
            let attribute = KeyValue {
                key: "threadlocal.schema_version".to_owned(),
                value,
                ..KeyValue::default()
            };
            decode(&ProcessContext { resource: None, attributes: vec![attribute] }.encode_to_vec())
        };
        assert!(
            ["tlsdesc_v1_dev", "tls_v1"].iter().all(|schema| published(schema).unwrap().threads)
        );
        assert_eq!(published("go_pprof_labels_v1"), None);
    }

    #[test]
    fn a_process_that_publishes_nothing_has_nothing() {
        assert_eq!(read(&ProcessHandle::open(std::process::id()).unwrap()), None);
    }
}
