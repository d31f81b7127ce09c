//! What an answer means, by the rules of the protocol document (opentelemetry-proto,
//! docs/specification.md): which failures are worth another attempt, how long the receiver wants to
//! be left alone, and that a partial success is never sent again.

use super::proto::{ExportProfilesPartialSuccess, ExportProfilesServiceResponse};
use crate::deliver::SendOutcome;
use crate::http::HttpResponse;
use crate::receiver::{retry_after, said, shortened, speaks_of_size};
use flate2::read::GzDecoder;
use hyper::header::CONTENT_TYPE;
use prost::Message;
use std::borrow::Cow;
use std::io::{self, Read as _};
use std::time::Duration;

/// A gRPC message is behind this: whether it is compressed, and its length.
const FRAME_BYTES: usize = 5;
/// Longest answer that is unpacked.
const MOST_ANSWER_BYTES: u64 = 1 << 20;

/// `google.rpc.Status`, as far as it is needed.
#[derive(Clone, PartialEq, Message)]
struct GrpcStatus {
    #[prost(message, repeated, tag = "3")]
    details: Vec<Any>,
}

/// `google.protobuf.Any`.
#[derive(Clone, PartialEq, Message)]
struct Any {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// `google.rpc.RetryInfo`.
#[derive(Clone, PartialEq, Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<Delay>,
}

/// `google.protobuf.Duration`.
#[derive(Clone, Copy, PartialEq, Message)]
struct Delay {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

/// Puts gRPC's frame around a packed message.
#[must_use]
pub fn frame(packed: &[u8]) -> Vec<u8> {
    let mut framed = Vec::with_capacity(FRAME_BYTES + packed.len());
    framed.push(1);
    framed.extend(u32::try_from(packed.len()).unwrap_or(u32::MAX).to_be_bytes());
    framed.extend(packed);
    framed
}

/// OTLP over HTTP.
#[must_use]
pub fn http(answer: &HttpResponse) -> SendOutcome {
    let is_page = answer
        .headers
        .get(CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"text/html"));
    match answer.status {
        // A page to log in at, or another service behind the same address.
        200..=299 if is_page => SendOutcome::Later {
            after: None,
            reason: format!(
                "{} with a page (text/html), which is no receiver's answer; is the URL right?",
                answer.status
            ),
        },
        200..=299 => accepted(&answer.body),
        _ => not_taken(answer),
    }
}

/// A status that is no success: which are the request's own fault, and which may pass.
fn not_taken(answer: &HttpResponse) -> SendOutcome {
    match answer.status {
        408 | 429 | 502 | 503 | 504 => {
            SendOutcome::Later { after: retry_after(&answer.headers), reason: said(answer) }
        }
        413 => SendOutcome::TooLarge(said(answer)),
        400 | 422 if speaks_of_size(&answer.body) => SendOutcome::TooLarge(said(answer)),
        400 | 409 | 411 | 422 => SendOutcome::Refused(said(answer)),
        _ => SendOutcome::Denied(said(answer)),
    }
}

/// OTLP over gRPC.
#[must_use]
pub fn grpc(answer: &HttpResponse) -> SendOutcome {
    // An answer without a body has its trailers in front.
    let field = |name: &str| {
        let value = answer.trailers.get(name).or_else(|| answer.headers.get(name));
        value.and_then(|value| value.to_str().ok())
    };
    let Some(code) = field("grpc-status").and_then(|code| code.trim().parse::<u32>().ok()) else {
        // Something in between answered (gRPC's document on HTTP status codes).
        return not_taken(answer);
    };
    let message = field("grpc-message").unwrap_or_default();
    let reason = || match shortened(message) {
        message if message.is_empty() => {
            format!("the receiver answers {}: it gives no reason", name(code))
        }
        message => format!("the receiver answers {}: {message}", name(code)),
    };
    let after = field("grpc-status-details-bin").and_then(retry_info);
    match code {
        0 => match unframed(&answer.body) {
            Ok(message) => accepted(&message),
            Err(error) => SendOutcome::Accepted { rejected: 0, remark: Some(strange(&error)) },
        },
        // Cancelled, deadline exceeded, aborted, out of range, unavailable, data loss.
        1 | 4 | 10 | 11 | 14 | 15 => SendOutcome::Later { after, reason: reason() },
        // Resource exhausted: for good, unless it says when not.
        8 if after.is_some() => SendOutcome::Later { after, reason: reason() },
        3 | 8 if speaks_of_size(message.as_bytes()) => SendOutcome::TooLarge(reason()),
        // Invalid argument, already exists, failed precondition.
        3 | 6 | 8 | 9 => SendOutcome::Refused(reason()),
        _ => SendOutcome::Denied(reason()),
    }
}

/// The message in gRPC's frame. A receiver may pack it as the request was.
fn unframed(body: &[u8]) -> io::Result<Cow<'_, [u8]>> {
    let wrong = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    match body.split_at_checked(FRAME_BYTES) {
        Some(([0, ..], message)) => Ok(message.into()),
        Some(([1, ..], packed)) => {
            let mut message = Vec::new();
            // What is cut is no message any more.
            GzDecoder::new(packed).take(MOST_ANSWER_BYTES).read_to_end(&mut message)?;
            Ok(message.into())
        }
        Some(([flag, ..], _)) => Err(wrong(format!("a frame begins with 0 or 1, found {flag}"))),
        None if body.is_empty() => Ok(Cow::default()),
        _ => Err(wrong(format!("a frame has {FRAME_BYTES} bytes, found {}", body.len()))),
    }
}

/// A receiver that answers with something else has taken it all the same.
fn strange(error: &dyn std::error::Error) -> String {
    format!("its answer is not understood: {}", shortened(&error.to_string()))
}

fn accepted(message: &[u8]) -> SendOutcome {
    let response = match ExportProfilesServiceResponse::decode(message) {
        Ok(response) => response,
        Err(error) => return SendOutcome::Accepted { rejected: 0, remark: Some(strange(&error)) },
    };
    let Some(ExportProfilesPartialSuccess { rejected_profiles, error_message }) =
        response.partial_success
    else {
        return SendOutcome::Accepted { rejected: 0, remark: None };
    };
    let remark = (!error_message.is_empty()).then(|| shortened(&error_message));
    SendOutcome::Accepted { rejected: u64::try_from(rejected_profiles).unwrap_or_default(), remark }
}

/// How long to wait, of a `google.rpc.Status` in base64.
fn retry_info(encoded: &str) -> Option<Duration> {
    let status = GrpcStatus::decode(base64(encoded)?.as_slice()).ok()?;
    let any = status.details.iter().find(|any| any.type_url.ends_with("/google.rpc.RetryInfo"))?;
    let delay = RetryInfo::decode(any.value.as_slice()).ok()?.retry_delay.unwrap_or_default();
    let whole = Duration::from_secs(u64::try_from(delay.seconds).unwrap_or_default());
    Some(whole + Duration::from_nanos(u64::try_from(delay.nanos).unwrap_or_default()))
}

/// Bytes of a binary header; senders may leave the padding out.
fn base64(text: &str) -> Option<Vec<u8>> {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut bytes = Vec::new();
    let (mut held, mut bits) = (0_u32, 0);
    for letter in text.trim_end_matches('=').bytes() {
        let value = LETTERS.iter().position(|&known| known == letter)?;
        held = (held << 6 | u32::try_from(value).ok()?) & 0xffff;
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push(u8::try_from(held >> bits & 0xff).ok()?);
        }
    }
    Some(bytes)
}

fn name(code: u32) -> String {
    const NAMES: [&str; 17] = [
        "OK",
        "CANCELLED",
        "UNKNOWN",
        "INVALID_ARGUMENT",
        "DEADLINE_EXCEEDED",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
        "INTERNAL",
        "UNAVAILABLE",
        "DATA_LOSS",
        "UNAUTHENTICATED",
    ];
    let known = usize::try_from(code).ok().and_then(|code| NAMES.get(code));
    known.map_or_else(|| format!("code {code}"), |name| (*name).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use hyper::body::Bytes;
    use hyper::header::{HeaderName, HeaderValue};
    use std::io::Write as _;

    fn answer(
        status: u16,
        headers: &[(&'static str, &str)],
        trailers: &[(&'static str, &str)],
        body: &[u8],
    ) -> HttpResponse {
        let map = |pairs: &[(&'static str, &str)]| {
            pairs
                .iter()
                .map(|(name, value)| {
                    (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())
                })
                .collect()
        };
        HttpResponse {
            status,
            headers: map(headers),
            trailers: map(trailers),
            body: Bytes::copy_from_slice(body),
        }
    }

    fn partial(rejected_profiles: i64) -> Vec<u8> {
        let partial_success = Some(ExportProfilesPartialSuccess {
            rejected_profiles,
            error_message: "too old".to_owned(),
        });
        ExportProfilesServiceResponse { partial_success }.encode_to_vec()
    }

    #[test]
    fn http_answers_mean_what_the_document_says() {
        assert_eq!(
            http(&answer(200, &[], &[], b"")),
            SendOutcome::Accepted { rejected: 0, remark: None }
        );
        assert_eq!(
            http(&answer(200, &[], &[], &partial(3))),
            SendOutcome::Accepted { rejected: 3, remark: Some("too old".to_owned()) }
        );
        for status in [429, 502, 503, 504] {
            let SendOutcome::Later { after, reason } =
                http(&answer(status, &[("retry-after", "7")], &[], b"busy\n"))
            else {
                panic!("{status}")
            };
            assert_eq!(after, Some(Duration::from_secs(7)));
            assert_eq!(reason, format!("the receiver answers {status}: busy"));
        }
        let page =
            http(&answer(200, &[("content-type", "text/html; charset=utf-8")], &[], b"<html>"));
        let SendOutcome::Later { reason, .. } = page else { panic!("{page:?}") };
        assert!(reason.contains("is the URL right?"), "{reason}");
        let of = |status, body: &[u8]| http(&answer(status, &[], &[], body));
        for status in [302, 401, 403, 404, 405, 500, 501] {
            assert!(matches!(of(status, b""), SendOutcome::Denied(_)), "{status}");
        }
        for status in [400, 422] {
            assert!(matches!(of(status, b"no such type"), SendOutcome::Refused(_)), "{status}");
            assert!(
                matches!(of(status, b"Profile SIZE exceeds 4"), SendOutcome::TooLarge(_)),
                "{status}"
            );
        }
        assert!(matches!(of(413, b""), SendOutcome::TooLarge(_)));
    }

    #[test]
    fn grpc_codes_mean_what_the_document_says() {
        let trailers = |code: &str| grpc(&answer(200, &[], &[("grpc-status", code)], b""));
        assert_eq!(trailers("0"), SendOutcome::Accepted { rejected: 0, remark: None });
        let body = [&[0, 0, 0, 0, 9][..], &partial(2)].concat();
        assert_eq!(
            grpc(&answer(200, &[], &[("grpc-status", "0")], &body)),
            SendOutcome::Accepted { rejected: 2, remark: Some("too old".to_owned()) }
        );
        for code in ["1", "4", "10", "11", "14", "15"] {
            assert!(matches!(trailers(code), SendOutcome::Later { after: None, .. }), "{code}");
        }
        for code in ["3", "6", "8", "9"] {
            assert!(matches!(trailers(code), SendOutcome::Refused(_)), "{code}");
        }
        for code in ["2", "5", "7", "12", "13", "16", "99"] {
            assert!(matches!(trailers(code), SendOutcome::Denied(_)), "{code}");
        }
        let long =
            [("grpc-status", "8"), ("grpc-message", "Received message larger than max (5 vs. 4)")];
        assert!(matches!(grpc(&answer(200, &[], &long, b"")), SendOutcome::TooLarge(_)));
        assert!(matches!(grpc(&answer(413, &[], &[], b"")), SendOutcome::TooLarge(_)));
        // Without a body the status is in front; without a status something in between has
        // answered.
        assert!(matches!(
            grpc(&answer(200, &[("grpc-status", "14")], &[], b"")),
            SendOutcome::Later { .. }
        ));
        assert!(matches!(grpc(&answer(503, &[], &[], b"")), SendOutcome::Later { .. }));
        assert!(matches!(grpc(&answer(404, &[], &[], b"")), SendOutcome::Denied(_)));
    }

    #[test]
    fn a_packed_answer_counts_as_a_plain_one() {
        let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
        packed.write_all(&partial(2)).unwrap();
        let packed = packed.finish().unwrap();
        let got = |flag: u8, message: &[u8]| {
            let body = [&[flag, 0, 0, 0, 9][..], message].concat();
            grpc(&answer(200, &[], &[("grpc-status", "0")], &body))
        };
        assert_eq!(
            got(1, &packed),
            SendOutcome::Accepted { rejected: 2, remark: Some("too old".to_owned()) }
        );
        for strange in [got(1, &partial(2)), got(7, &partial(2)), got(0, &packed)] {
            let SendOutcome::Accepted { rejected: 0, remark: Some(remark) } = strange else {
                panic!()
            };
            assert!(remark.contains("not understood"), "{remark}");
        }
        let mut long = GzEncoder::new(Vec::new(), Compression::fast());
        long.write_all(&vec![0; 2 << 20]).unwrap();
        let long = [&[1, 0, 0, 0, 9][..], &long.finish().unwrap()].concat();
        assert_eq!(unframed(&long).unwrap().len(), 1 << 20);
        assert!(unframed(&[0, 0]).is_err());
    }

    #[test]
    fn exhausted_with_a_time_is_tried_again_then() {
        let delay = Some(Delay { seconds: 30, nanos: 500_000_000 });
        let value = RetryInfo { retry_delay: delay }.encode_to_vec();
        let any = Any { type_url: "type.googleapis.com/google.rpc.RetryInfo".to_owned(), value };
        let status = GrpcStatus { details: vec![any] }.encode_to_vec();
        let letters = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut text = String::new();
        for chunk in status.chunks(3) {
            let held = chunk.iter().fold(0_u32, |held, &byte| held << 8 | u32::from(byte))
                << (8 * (3 - chunk.len()));
            for at in 0..=chunk.len() {
                text.push(char::from(
                    letters[usize::try_from(held >> (18 - 6 * at) & 63).unwrap()],
                ));
            }
        }
        assert_eq!(base64(&text).unwrap(), status);
        let got = grpc(&answer(
            200,
            &[],
            &[("grpc-status", "8"), ("grpc-status-details-bin", &text)],
            b"",
        ));
        let SendOutcome::Later { after, .. } = got else { panic!("{got:?}") };
        assert_eq!(after, Some(Duration::from_millis(30_500)));
        assert_eq!(base64("!"), None);
    }

    #[test]
    fn a_framed_message_has_its_length_in_front() {
        assert_eq!(frame(b"abc"), [1, 0, 0, 0, 3, b'a', b'b', b'c']);
    }
}
