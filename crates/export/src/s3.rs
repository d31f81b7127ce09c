//! Profiles as objects of S3, or of a store that speaks its protocol:
//! `PREFIX/SERVICE/NODE/TIME.pb.gz`, whole pprof files as the files' sink writes them, from a spool
//! of their own. An object is put again under the same key until the store has it, so nothing is
//! there twice.

use super::deliver::{LazyDelivery, Remote, SendOutcome, SpoolBacklog};
use super::directory::{encode, file_name, moment};
use super::file::{self, FileError};
use super::receiver::{SpoolOptions, only_a_place, shortened};
use super::spool::ItemKind;
use super::{FinishedProfile, Sink, SinkError};
use crate::quantity::HumanDuration;
use object_store::aws::{AmazonS3, AmazonS3Builder, AwsCredential};
use object_store::path::Path as Key;
use object_store::{Certificate, ClientOptions, CredentialProvider, ObjectStore as _, RetryConfig};
use prost::Message;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

/// How often a request in progress looks when it has to end.
const DEADLINE_LOOK: Duration = Duration::from_millis(200);
/// What S3 takes for the length of a key (Amazon S3 user guide, "Naming Amazon S3 objects"), less
/// what is behind the prefix.
const MOST_PREFIX_BYTES: usize = 512;
/// What a sample's node is called in labels.
const NODE: &str = "host.name";

/// A bucket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[schemars(extend("required" = ["bucket"]))]
pub struct S3Options {
    /// Its name.
    pub bucket: String,
    /// In front of all keys.
    pub prefix: String,
    /// Where it lies; absent: what the environment says (`AWS_REGION`), else `us-east-1`.
    pub region: Option<String>,
    /// URL of another store than Amazon's, such as `https://minio:9000`, which then has the
    /// bucket's name in its path.
    pub endpoint: Option<String>,
    /// Files with the access key's id and its secret, both read anew for each request. Absent: what
    /// the environment has, as Amazon's own tools find it (variables, a token of the pod's service
    /// account, the container's or the machine's metadata).
    pub key_id_file: Option<PathBuf>,
    /// See `key_id_file`.
    pub secret_file: Option<PathBuf>,
    /// PEM file with the certificate authorities to believe besides the system's.
    pub ca_file: Option<PathBuf>,
    /// For one attempt.
    pub timeout: HumanDuration,
}

impl Default for S3Options {
    fn default() -> Self {
        Self {
            bucket: String::new(),
            prefix: String::new(),
            region: None,
            endpoint: None,
            key_id_file: None,
            secret_file: None,
            ca_file: None,
            timeout: HumanDuration(Duration::from_secs(30)),
        }
    }
}

impl S3Options {
    /// Where its objects are, for messages and for telling two of them apart.
    #[must_use]
    pub fn place(&self) -> String {
        let endpoint = self.endpoint.as_deref().map_or("s3:", |url| url.trim_end_matches('/'));
        let prefix = self.prefix.trim_matches('/');
        format!("{endpoint}//{}{}{prefix}", self.bucket, if prefix.is_empty() { "" } else { "/" })
    }

    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// What was expected and found.
    pub fn check(&self) -> Result<(), String> {
        let plain =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
        if !(3..=63).contains(&self.bucket.len()) || !self.bucket.bytes().all(plain) {
            return Err(format!(
                "bucket: expected 3 to 63 small letters, digits, `-` and `.`, found `{}`",
                self.bucket
            ));
        }
        if let Some(url) = &self.endpoint {
            only_a_place(url).map_err(|problem| format!("endpoint: {problem}"))?;
        }
        if let Some(url) = &self.endpoint
            && !(url.starts_with("https://") || url.starts_with("http://"))
        {
            return Err(format!(
                "endpoint: expected a URL such as https://minio:9000, found `{url}`"
            ));
        }
        if self.prefix.len() > MOST_PREFIX_BYTES {
            return Err(format!(
                "prefix: expected {MOST_PREFIX_BYTES} bytes at most, found {}",
                self.prefix.len()
            ));
        }
        // A store is asked for no key that has other parts.
        if let Err(error) = Key::parse(self.prefix.trim_matches('/')) {
            return Err(format!(
                "prefix: expected parts of printable characters between single slashes, none of \
                 them `.` or `..`, found `{}`: {error}",
                self.prefix.escape_debug()
            ));
        }
        if self.key_id_file.is_some() != self.secret_file.is_some() {
            return Err(
                "expected key_id_file and secret_file together, found one of them".to_owned()
            );
        }
        Ok(())
    }

    fn store(&self) -> Result<AmazonS3, String> {
        self.check()?;
        let mut client = ClientOptions::new()
            .with_timeout(self.timeout.0)
            .with_connect_timeout(self.timeout.0)
            .with_allow_http(self.endpoint.as_ref().is_some_and(|url| url.starts_with("http://")));
        if let Some(path) = &self.ca_file {
            let found = fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
            let authorities = Certificate::from_pem_bundle(&found);
            for authority in authorities.map_err(|error| format!("{}: {error}", path.display()))? {
                client = client.with_root_certificate(authority);
            }
        }
        // The spool tries again, and knows when.
        let never =
            RetryConfig { max_retries: 0, retry_timeout: Duration::ZERO, ..RetryConfig::default() };
        let mut store = AmazonS3Builder::from_env()
            .with_bucket_name(&self.bucket)
            .with_client_options(client)
            .with_retry(never);
        if let Some(region) = &self.region {
            store = store.with_region(region);
        }
        if let Some(endpoint) = &self.endpoint {
            store = store.with_endpoint(endpoint.trim_end_matches('/'));
        }
        if let (Some(key_id), Some(secret)) = (&self.key_id_file, &self.secret_file) {
            let files = KeyFiles { key_id: key_id.clone(), secret: secret.clone() };
            files.read().map_err(|error| error.to_string())?;
            store = store.with_credentials(Arc::new(files));
        }
        store.build().map_err(|error| error.to_string())
    }
}

/// An access key in two files.
#[derive(Debug)]
struct KeyFiles {
    key_id: PathBuf,
    secret: PathBuf,
}

impl KeyFiles {
    fn read(&self) -> Result<AwsCredential, FileError> {
        let read = |path: &PathBuf| {
            let failed = |source| FileError { path: path.clone(), step: "read", source };
            fs::read_to_string(path).map(|text| text.trim().to_owned()).map_err(failed)
        };
        Ok(AwsCredential {
            key_id: read(&self.key_id)?,
            secret_key: read(&self.secret)?,
            token: None,
        })
    }
}

impl CredentialProvider for KeyFiles {
    type Credential = AwsCredential;

    /// In the form that the macro `async_trait` gives the trait's method.
    fn get_credential<'a, 'b>(
        &'a self,
    ) -> Pin<Box<dyn Future<Output = object_store::Result<Arc<AwsCredential>>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        let failed = |error: FileError| object_store::Error::Generic {
            store: "S3",
            source: Box::new(error),
        };
        let read = self.read().map(Arc::new).map_err(failed);
        Box::pin(std::future::ready(read))
    }
}

/// What waits in the spool.
#[derive(Clone, PartialEq, Message)]
struct SpooledObject {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(bytes = "vec", tag = "2")]
    body: Vec<u8>,
}

/// The sink.
pub struct S3 {
    name: String,
    prefix: String,
    delivery: LazyDelivery,
    objects: u64,
}

impl S3 {
    /// Sets it up; what an earlier daemon left is sent when the first window is over.
    ///
    /// # Errors
    /// When the settings cannot be used. A store that is away is no error.
    pub fn open(options: &S3Options, spool: &SpoolOptions) -> Result<Self, SinkError> {
        let place = options.place();
        let refused =
            |reason: String| SinkError::Refused { reason: format!("s3 {place}: {reason}") };
        let store = options.store().map_err(refused)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| refused(error.to_string()))?;
        let directory = spool.directory_of("s3", &place).map_err(refused)?;
        file::make_directory(&directory)?;
        let bucket = Bucket { store, runtime: Some(runtime) };
        let name = format!("s3 {place}");
        Ok(Self {
            delivery: LazyDelivery::new(
                &name,
                directory,
                spool.limits(),
                options.timeout.0,
                bucket,
            ),
            name,
            prefix: options.prefix.trim_matches('/').to_owned(),
            objects: 0,
        })
    }
}

impl Sink for S3 {
    fn name(&self) -> &str {
        &self.name
    }

    fn place(&self) -> &Path {
        self.delivery.directory()
    }

    fn put(&mut self, finished: &FinishedProfile) -> Result<(), SinkError> {
        let object = SpooledObject {
            key: key(&self.prefix, finished),
            body: finished.profile.bytes().to_vec(),
        };
        self.objects += 1;
        let at = finished.start + finished.duration;
        Ok(self.delivery.put(at, ItemKind::Request, &finished.service, &object.encode_to_vec())?)
    }

    fn window_over(&mut self) {
        self.delivery.take_up();
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.delivery.figures().counters(self.objects).to_vec()
    }

    fn backlog(&self) -> Option<SpoolBacklog> {
        Some(self.delivery.backlog())
    }

    fn close(&mut self, deadline: Instant) {
        self.delivery.close(deadline);
    }
}

/// A profile's key.
fn key(prefix: &str, finished: &FinishedProfile) -> String {
    let node = encode(finished.labels.get(NODE).map_or("unknown", String::as_str));
    let slash = if prefix.is_empty() { "" } else { "/" };
    format!(
        "{prefix}{slash}{}/{node}/{}",
        encode(&finished.service),
        file_name(moment(finished.start), 0)
    )
}

struct Bucket {
    store: AmazonS3,
    /// There until it is dropped.
    runtime: Option<Runtime>,
}

impl Drop for Bucket {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // A name server that does not answer holds nobody up.
            runtime.shutdown_background();
        }
    }
}

impl Remote for Bucket {
    /// Nothing that a store says is known to be about this object alone, so it waits: a key that
    /// ran out and a bucket that is not there can be repaired meanwhile. One that is refused again
    /// and again while others are taken is given up.
    fn send(&mut self, payload: &[u8], deadline: &dyn Fn() -> Instant) -> SendOutcome {
        let Ok(SpooledObject { key, body }) = SpooledObject::decode(payload) else {
            return SendOutcome::Refused("what waited in the spool is no object".to_owned());
        };
        let Ok(key) = Key::parse(&key) else {
            return SendOutcome::Refused(format!("`{}` is no key", shortened(&key)));
        };
        let later = |reason: String| SendOutcome::Later { after: None, reason };
        let Some(runtime) = &self.runtime else { return later("the runtime is gone".to_owned()) };
        let answer = runtime.block_on(async {
            let mut put = std::pin::pin!(self.store.put(&key, body.into()));
            loop {
                let look = deadline().min(Instant::now() + DEADLINE_LOOK);
                match tokio::time::timeout_at(look.into(), put.as_mut()).await {
                    Ok(answer) => return answer.map_err(|error| error.to_string()),
                    Err(_) if Instant::now() >= deadline() => {
                        return Err("no answer in time".to_owned());
                    }
                    Err(_) => {}
                }
            }
        });
        match answer {
            Ok(_) => SendOutcome::Accepted { rejected: 0, remark: None },
            // Its key has the service in it, and the cause is the same for all.
            Err(error) => {
                let key: &str = key.as_ref();
                later(shortened(&error.replace(key, "…")))
            }
        }
    }

    fn service(&self, payload: &[u8]) -> String {
        let key = SpooledObject::decode(payload).unwrap_or_default().key;
        key.rsplit('/').nth(2).unwrap_or_default().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::{S3Options, key};
    use crate::FinishedProfile;
    use perfusion_pprof::proto::Profile;
    use std::collections::BTreeMap;
    use std::time::{Duration, SystemTime};

    #[test]
    fn a_key_has_service_node_and_time() {
        let finished = FinishedProfile {
            service: "shop/api".into(),
            labels: BTreeMap::from([("host.name".to_owned(), "node 1".to_owned())]),
            start: SystemTime::UNIX_EPOCH + Duration::from_millis(1_500),
            duration: Duration::from_secs(60),
            profile: Profile::default().into(),
        };
        assert_eq!(key("a/b", &finished), "a/b/shop%2Fapi/node%201/19700101T000001.500Z.pb.gz");
        let nobody = FinishedProfile { labels: BTreeMap::new(), ..finished };
        assert_eq!(key("", &nobody), "shop%2Fapi/unknown/19700101T000001.500Z.pb.gz");
    }

    #[test]
    fn what_cannot_be_is_told() {
        let good = S3Options { bucket: "profiles".to_owned(), ..S3Options::default() };
        assert_eq!((good.check(), good.place().as_str()), (Ok(()), "s3://profiles"));
        let elsewhere = S3Options {
            endpoint: Some("http://a:9000/".to_owned()),
            prefix: "/x/".to_owned(),
            ..good.clone()
        };
        assert_eq!(
            (elsewhere.check(), elsewhere.place().as_str()),
            (Ok(()), "http://a:9000//profiles/x")
        );
        for bad in [
            S3Options::default(),
            S3Options { bucket: "Big".to_owned(), ..good.clone() },
            S3Options { endpoint: Some("minio:9000".to_owned()), ..good.clone() },
            S3Options { prefix: "x".repeat(600), ..good.clone() },
            S3Options { prefix: "a//b".to_owned(), ..good.clone() },
            S3Options { prefix: "/a/../b".to_owned(), ..good.clone() },
            S3Options { prefix: ".".to_owned(), ..good.clone() },
            S3Options { prefix: "a\nb".to_owned(), ..good.clone() },
            S3Options { secret_file: Some("/s".into()), ..good },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }
}
