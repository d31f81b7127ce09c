//! Options that every receiver over a network has, and the spool all of them share the directory
//! of.

use super::SinkError;
use super::deliver::SendOutcome;
use super::file;
use super::http::{self, Client, HttpResponse, Secret, Tls, Version};
use super::spool::SpoolLimits;
use crate::quantity::{ByteSize, HumanDuration};
use hyper::header::{HeaderMap, HeaderName, HeaderValue, LOCATION, RETRY_AFTER};
use hyper::{StatusCode, Uri};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// Longest name of a receiver's directory, bytes; file systems take 255.
const NAME_BYTES: usize = 240;
/// In place of a header's value.
const HIDDEN: &str = "(hidden)";

/// Where profiles that cannot be sent yet wait, in one directory for each receiver. The oldest go
/// first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SpoolOptions {
    /// Where; needed as soon as there is a receiver.
    pub directory: Option<PathBuf>,
    /// Most bytes for each receiver.
    pub max_size: ByteSize,
    /// An older profile is dropped. Pyroscope takes none that began an hour ago, so there it goes
    /// 58 minutes after its start at the latest.
    pub max_age: HumanDuration,
    /// Free space of the file system below which nothing is kept.
    pub keep_free: ByteSize,
}

impl Default for SpoolOptions {
    fn default() -> Self {
        Self {
            directory: None,
            max_size: ByteSize(512 << 20),
            max_age: HumanDuration(Duration::from_secs(86_400)),
            keep_free: ByteSize(1 << 30),
        }
    }
}

impl SpoolOptions {
    /// The same for a spool.
    #[must_use]
    pub fn limits(&self) -> SpoolLimits {
        SpoolLimits { bytes: self.max_size.0, age: self.max_age.0, free_bytes: self.keep_free.0 }
    }

    /// Directory of one receiver. Two receivers never have the same: each would send and remove
    /// what is for the other.
    ///
    /// # Errors
    /// When there is no directory at all, or the URL is too long for the name of one.
    pub fn directory_of(&self, kind: &str, url: &str) -> Result<PathBuf, String> {
        let directory = self.directory.as_ref().ok_or("no spool")?;
        let mut name = format!("{kind}-");
        for &byte in url.as_bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'-' | b'_' => {
                    name.push(char::from(byte))
                }
                _ => name.push_str(&format!("%{byte:02X}")),
            }
        }
        if name.len() > NAME_BYTES {
            return Err(format!(
                "its spool's directory is named after the URL, which is too long for that: \
                 expected {NAME_BYTES} \
                 bytes with all but letters, digits and `.-_` as %XX, found {}",
                name.len()
            ));
        }
        Ok(directory.join(name))
    }
}

/// How a receiver is reached.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Reach {
    /// Sent with every request. What is secret belongs into `header_files` or `token_file`.
    pub headers: BTreeMap<String, String>,
    /// Likewise, by files that hold the values and are read anew for each request; blanks around a
    /// value are no part of it.
    pub header_files: BTreeMap<String, PathBuf>,
    /// File with a token, sent as `Authorization: Bearer …` and read anew for each request.
    pub token_file: Option<PathBuf>,
    /// PEM file with the certificate authorities to believe, instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// PEM file with our certificate, for receivers that ask for one.
    pub certificate_file: Option<PathBuf>,
    /// PEM file with its key.
    pub key_file: Option<PathBuf>,
}

impl Reach {
    /// The settings for a URL.
    ///
    /// # Errors
    /// What was expected and found.
    pub fn settings(&self, url: &str) -> Result<http::HttpSettings, String> {
        if url.is_empty() {
            return Err("expected `url`, such as https://collector:4318, found none".to_owned());
        }
        only_a_place(url)?;
        let parsed: Uri = url.parse().map_err(|error| format!("`{url}` is no URL: {error}"))?;
        if !matches!(parsed.scheme_str(), Some("http" | "https")) || parsed.host().is_none() {
            return Err(format!("expected a URL such as https://collector:4318, found `{url}`"));
        }
        let values =
            self.headers.iter().map(|(name, value)| (name.as_str(), Secret::Value(value.clone())));
        let files = self.header_files.iter();
        let files = files.map(|(name, file)| (name.as_str(), Secret::File("", file.clone())));
        let token = self.token_file.iter();
        let token = token.map(|file| ("authorization", Secret::File("Bearer ", file.clone())));
        let mut headers: Vec<(HeaderName, Secret)> = Vec::new();
        for (name, secret) in values.chain(files).chain(token) {
            let known: HeaderName =
                name.parse().map_err(|_| format!("`{name}` is no name of a header"))?;
            if headers.iter().any(|(other, _)| *other == known) {
                return Err(format!(
                    "expected each header once in headers, header_files and token_file \
                     (`authorization`), found `{known}` twice"
                ));
            }
            if let Secret::Value(value) = &secret {
                let value: Result<HeaderValue, _> = value.parse();
                value.map_err(|_| {
                    format!("headers: `{known}`: expected visible characters, found others")
                })?;
            }
            headers.push((known, secret));
        }
        let client = match (&self.certificate_file, &self.key_file) {
            (Some(certificate), Some(key)) => Some((certificate.clone(), key.clone())),
            (None, None) => None,
            _ => {
                return Err(
                    "expected certificate_file and key_file together, found one of them".to_owned()
                );
            }
        };
        Ok(http::HttpSettings {
            url: parsed,
            headers,
            tls: Tls { authority: self.ca_file.clone(), client },
        })
    }

    /// Takes the values of headers out, for who may see the rest.
    pub fn hide(&mut self) {
        self.headers.values_mut().for_each(|value| HIDDEN.clone_into(value));
    }
}

/// Where a receiver is, for messages, its spool, and for telling two of them apart: a path's last
/// slash is nothing to it.
pub(super) fn place(url: &str) -> &str {
    url.trim_end_matches('/')
}

/// Refuses a URL that says more than where the receiver is: that is not sent, and would be in
/// messages, metrics and the names of directories. So it is not in the answer either.
///
/// # Errors
/// What was expected and found.
pub(super) fn only_a_place(url: &str) -> Result<(), String> {
    let (_, place) = url.split_once("://").unwrap_or(("", url));
    let authority = place.split(['/', '?', '#']).next().unwrap_or_default();
    let found = if authority.contains('@') {
        "a user in front of the host (`…@`)"
    } else if place.contains('?') {
        "a query (`?…`)"
    } else if place.contains('#') {
        "a fragment (`#…`)"
    } else {
        return Ok(());
    };
    Err(format!(
        "its URL: expected scheme, host, port and path, found {found}; what is secret belongs into \
         a file that is named in the configuration \
         (`token_file`, `header_files`; `key_id_file` and `secret_file` of s3), what else is to be \
         sent into `headers`"
    ))
}

/// Client and spool directory of one receiver; `kind` and the URL's [`place`] are its name.
///
/// # Errors
/// When the settings cannot be used: what is wrong with them, the directory's too, is told now. A
/// receiver that is away is no error, and a file that cannot be read none either: both can be
/// repaired while profiles wait, and the other sinks are not to suffer.
pub(super) fn open(
    kind: &str,
    url: &str,
    reach: &Reach,
    version: Version,
    spool: &SpoolOptions,
) -> Result<(Client, PathBuf), SinkError> {
    // Before the URL is in a message.
    only_a_place(url)
        .map_err(|reason| SinkError::Refused { reason: format!("{kind}: {reason}") })?;
    let place = place(url);
    let refused =
        |reason: String| SinkError::Refused { reason: format!("{kind} {place}: {reason}") };
    let settings = reach.settings(url).map_err(refused)?;
    if let Some(trouble) = trouble_of_files(&settings, version) {
        tracing::warn!(sink = format!("{kind} {place}"), "{trouble}");
    }
    let client = Client::new(settings, version).map_err(|error| refused(error.to_string()))?;
    let directory = spool.directory_of(kind, place).map_err(refused)?;
    file::make_directory(&directory)?;
    Ok((client, directory))
}

/// What is wrong with a receiver's files now, in words, and what comes of it.
#[must_use]
pub fn trouble_of_files(settings: &http::HttpSettings, version: Version) -> Option<String> {
    let error = settings.check_files(version).err()?;
    Some(format!("{error}; what is for it waits in the spool until that is repaired"))
}

/// When there was no answer. Nobody there, no name, a certificate that has run out: all of it can
/// be repaired while the profile waits. What happened when it was on its way may be its own fault.
pub(super) fn unreached(error: &http::HttpError) -> SendOutcome {
    let reason = error.to_string();
    match error {
        http::HttpError::Http(_) | http::HttpError::Body(_) | http::HttpError::Timeout => {
            SendOutcome::Later { after: None, reason }
        }
        _ => SendOutcome::Unreached(reason),
    }
}

/// True of a text that is about the length of a request.
pub(super) fn speaks_of_size(text: &[u8]) -> bool {
    const WORDS: [&str; 7] =
        ["too large", "too big", "too long", "larger than", "size", "maximum", "max_"];
    let text = String::from_utf8_lossy(text).to_ascii_lowercase();
    WORDS.iter().any(|word| text.contains(word))
}

/// What a receiver says that did not take something.
pub(super) fn said(answer: &HttpResponse) -> String {
    let status = StatusCode::from_u16(answer.status).ok();
    let location = answer.headers.get(LOCATION).filter(|_| (300..400).contains(&answer.status));
    let text = match (location, shortened(&String::from_utf8_lossy(&answer.body))) {
        (Some(location), _) => {
            format!("it redirects to {}, which is not followed", shortened(&place_of(location)))
        }
        (None, text) if !text.trim().is_empty() => text,
        _ => status
            .and_then(|status| status.canonical_reason())
            .unwrap_or("it gives no reason")
            .to_owned(),
    };
    let hint = match answer.status {
        300..=399 | 404 | 405 => "; is the URL right?",
        _ => "",
    };
    format!("the receiver answers {}: {text}{hint}", answer.status)
}

/// Where a redirect leads. A user, a query and a fragment may be secret: they are left out.
fn place_of(location: &HeaderValue) -> String {
    let Some(url) = location.to_str().ok().and_then(|text| text.parse::<Uri>().ok()) else {
        return "what is no URL".to_owned();
    };
    let authority = url.authority().map_or("", |authority| authority.as_str());
    let host = authority.rsplit('@').next().unwrap_or_default();
    let scheme = url.scheme_str().map(|scheme| format!("{scheme}://")).unwrap_or_default();
    format!("{scheme}{host}{}", url.path())
}

/// What a stranger says, for a line of the log.
pub(super) fn shortened(text: &str) -> String {
    text.chars().filter(|letter| !letter.is_control()).take(200).collect()
}

/// How long a receiver wants to be left alone.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    asked_for(headers.get(RETRY_AFTER)?.to_str().ok()?.trim(), SystemTime::now())
}

/// The same of its words: seconds, or the moment it ends (RFC 9110, 10.2.3).
fn asked_for(text: &str, now: SystemTime) -> Option<Duration> {
    let seconds = text.parse().ok().map(Duration::from_secs);
    // A moment that has passed is no time at all.
    seconds.or_else(|| {
        Some(httpdate::parse_http_date(text).ok()?.duration_since(now).unwrap_or_default())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_receiver_has_a_directory_of_its_own_below_the_spool() {
        let spool = SpoolOptions { directory: Some("/s".into()), ..SpoolOptions::default() };
        let of = |url: &str| spool.directory_of("otlp", url).unwrap();
        assert_eq!(
            of("http://a:4317/../x"),
            PathBuf::from("/s/otlp-http%3A%2F%2Fa%3A4317%2F..%2Fx")
        );
        assert_ne!(of("http://a/team-a"), of("http://a/team_a"));
        assert_ne!(of("http://a/team-a"), of("http://a/team/a"));
        assert_ne!(
            of(&format!("http://a/{}a", "x".repeat(200))),
            of(&format!("http://a/{}b", "x".repeat(200)))
        );
        assert!(spool.directory_of("otlp", &"x".repeat(300)).unwrap_err().contains("too long"));
        assert!(SpoolOptions::default().directory_of("otlp", "http://a").is_err());
    }

    #[test]
    fn what_cannot_be_reached_is_told() {
        let reach = Reach::default();
        assert!(reach.settings("https://collector:4318/base").is_ok());
        for bad in ["collector:4318", "ftp://collector", "http://", "http://a b", ""] {
            assert!(reach.settings(bad).is_err(), "{bad}");
        }
        for secret in
            ["http://user:secret@a:4318", "https://a/x?key=secret", "http://a#secret", "secret@a"]
        {
            let error = reach.settings(secret).unwrap_err();
            assert!(
                error.contains("token_file")
                    && !error.contains("secret@")
                    && !error.contains("key="),
                "{error}"
            );
        }
        let half = Reach { key_file: Some("/k".into()), ..Reach::default() };
        assert!(half.settings("http://a").unwrap_err().contains("together"));
        let header = Reach {
            headers: BTreeMap::from([("a b".to_owned(), String::new())]),
            ..Reach::default()
        };
        assert!(header.settings("http://a").unwrap_err().contains("`a b`"));
    }

    #[test]
    fn each_header_comes_from_one_place() {
        let value = |name: &str| BTreeMap::from([(name.to_owned(), "secret".to_owned())]);
        let file = |name: &str| BTreeMap::from([(name.to_owned(), PathBuf::from("/h"))]);
        let token_file = Some("/t".into());
        let reach = Reach {
            headers: value("x-scope-orgid"),
            header_files: file("x-api-key"),
            token_file: token_file.clone(),
            ..Reach::default()
        };
        let settings = reach.settings("http://a").unwrap();
        let names: Vec<&str> = settings.headers.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["x-scope-orgid", "x-api-key", "authorization"]);
        let twice = [
            Reach { headers: value("X-Api-Key"), ..reach.clone() },
            Reach { header_files: file("Authorization"), ..reach },
        ];
        for (reach, name) in twice.into_iter().zip(["`x-api-key`", "`authorization`"]) {
            let error = reach.settings("http://a").unwrap_err();
            assert!(error.contains(name) && !error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn what_a_receiver_answers_has_a_text_and_a_hint_where_the_url_may_be_wrong() {
        let of = |status, location: Option<&str>, body: &'static str| {
            let location = location.map(|place| (LOCATION, place.parse().unwrap()));
            said(&HttpResponse {
                status,
                headers: location.into_iter().collect(),
                trailers: HeaderMap::new(),
                body: body.into(),
            })
        };
        for (status, location, body, expected) in [
            (503, None, "busy", "503: busy"),
            (503, None, " \n", "503: Service Unavailable"),
            (599, None, "", "599: it gives no reason"),
            (404, None, "", "404: Not Found; is the URL right?"),
            (405, None, "no POST", "405: no POST; is the URL right?"),
            (
                301,
                Some("https://user:word@a/otlp?token=secret"),
                "<a>moved</a>",
                "301: it redirects to https://a/otlp, which is not followed; is the URL right?",
            ),
            (302, None, "", "302: Found; is the URL right?"),
            (400, Some("/x"), "no", "400: no"),
        ] {
            assert_eq!(of(status, location, body), format!("the receiver answers {expected}"));
        }
        let long = format!("https://a/{}", "x".repeat(5_000));
        assert!(of(308, Some(&long), "").len() < 400);
    }

    #[test]
    fn a_receiver_says_how_long_in_seconds_or_until_when() {
        let now = httpdate::parse_http_date("Wed, 25 Nov 2026 10:00:00 GMT").unwrap();
        let of = |text: &str| asked_for(text, now);
        assert_eq!(of("120"), Some(Duration::from_secs(120)));
        assert_eq!(of("Wed, 25 Nov 2026 10:01:30 GMT"), Some(Duration::from_secs(90)));
        assert_eq!(of("Wed, 25 Nov 2026 09:00:00 GMT"), Some(Duration::ZERO));
        assert_eq!((of("soon"), of("-1"), of("")), (None, None, None));
    }
}
