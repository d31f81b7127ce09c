//! The pods of this node: who they are, for rules, names of services and labels. Known from the
//! directories the kubelet keeps their logs in (`logs`: namespaces and names), or from the API
//! server (`api`: containers, labels and annotations, too), and kept in one table (`host::pods`).

pub mod api;
pub mod logs;
pub mod object;

use hyper::Uri;
use hyper::header::AUTHORIZATION;
use perfusion_export::http::{HttpSettings, Secret, Tls};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Names of what the kubelet tells every container about the API server.
const HOST: &str = "KUBERNETES_SERVICE_HOST";
const PORT: &str = "KUBERNETES_SERVICE_PORT";
/// Where it puts the service account's token and whom to believe.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Most keys of labels and annotations that may be shown.
const MOST_KEYS: usize = 32;

/// Where pods are known from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PodSource {
    /// The names of the directories of their logs: namespaces and names, nothing else.
    #[default]
    Logs,
    /// The API server, asked for the pods of this node.
    Api,
}

/// The pods of this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct KubernetesConfig {
    /// Where they are known from: logs or api.
    pub pods: PodSource,
    /// Where the kubelet keeps the logs of pods, for `logs`.
    pub pod_logs: PathBuf,
    /// Name of this node, for `api`; profiles have it as `k8s.node.name`.
    pub node: Option<String>,
    /// The API server; absent: the one that the kubelet tells containers of.
    pub url: Option<String>,
    /// File with the token for the API server.
    pub token_file: PathBuf,
    /// PEM file with the authority that the API server's certificate is from.
    pub ca_file: PathBuf,
    /// Keys of pods' labels that samples show as `k8s.pod.label.KEY`.
    pub labels: Vec<String>,
    /// Keys of pods' annotations that samples show as `k8s.pod.annotation.KEY`.
    pub annotations: Vec<String>,
}

impl Default for KubernetesConfig {
    fn default() -> Self {
        Self {
            pods: PodSource::default(),
            pod_logs: PathBuf::from("/var/log/pods"),
            node: None,
            url: None,
            token_file: PathBuf::from(ACCOUNT).join("token"),
            ca_file: PathBuf::from(ACCOUNT).join("ca.crt"),
            labels: Vec::new(),
            annotations: Vec::new(),
        }
    }
}

impl KubernetesConfig {
    /// Checks what the types cannot say.
    ///
    /// # Errors
    /// What was expected and found.
    pub fn check(&self) -> Result<(), String> {
        for keys in [&self.labels, &self.annotations] {
            if keys.len() > MOST_KEYS {
                return Err(format!("expected at most {MOST_KEYS} keys, found {}", keys.len()));
            }
        }
        if self.pods == PodSource::Logs {
            return Ok(());
        }
        match &self.node {
            // It becomes part of a URL, and names of nodes are DNS names.
            Some(node) if is_name(node) => {}
            found => {
                return Err(format!(
                    "node: expected the name of this node, since pods is api, found {}",
                    found.as_deref().unwrap_or("none")
                ));
            }
        }
        self.url.iter().try_for_each(|url| self.settings_for(url).map(drop))
    }

    /// How the API server is reached.
    ///
    /// # Errors
    /// What was expected and found.
    pub fn settings(&self) -> Result<HttpSettings, String> {
        match &self.url {
            Some(url) => self.settings_for(url),
            None => {
                let told = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
                let (Some(host), Some(port)) = (told(HOST), told(PORT)) else {
                    return Err(format!(
                        "kubernetes.url: expected one, since {HOST} and {PORT} are not in the \
                         environment: this is no container of a cluster"
                    ));
                };
                self.settings_for(&format!("https://{}:{port}", bracketed(&host)))
            }
        }
    }

    fn settings_for(&self, url: &str) -> Result<HttpSettings, String> {
        let parsed: Uri = url.parse().map_err(|error| format!("`{url}` is no URL: {error}"))?;
        if !matches!(parsed.scheme_str(), Some("http" | "https")) || parsed.host().is_none() {
            return Err(format!(
                "url: expected a URL such as https://10.96.0.1:443, found `{url}`"
            ));
        }
        let token = Secret::File("Bearer ", self.token_file.clone());
        let tls = Tls { authority: Some(self.ca_file.clone()), client: None };
        Ok(HttpSettings { url: parsed, headers: vec![(AUTHORIZATION, token)], tls })
    }
}

/// An IPv6 address as part of a URL.
fn bracketed(host: &str) -> String {
    if host.contains(':') { format!("[{host}]") } else { host.to_owned() }
}

fn is_name(text: &str) -> bool {
    (1..=253).contains(&text.len())
        && text
            .bytes()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, b'-' | b'.'))
}

#[cfg(test)]
mod tests {
    use super::{KubernetesConfig, PodSource, bracketed};

    #[test]
    fn the_api_server_is_asked_about_a_node_that_has_a_name() {
        let api = |node: Option<&str>, url: &str| KubernetesConfig {
            pods: PodSource::Api,
            node: node.map(str::to_owned),
            url: Some(url.to_owned()),
            ..KubernetesConfig::default()
        };
        assert!(KubernetesConfig::default().check().is_ok());
        assert!(api(Some("node-1.example"), "https://10.96.0.1:443").check().is_ok());
        for (options, said) in [
            (api(None, "https://a"), "found none"),
            (api(Some("a&limit=1"), "https://a"), "found a&limit=1"),
            (api(Some("n"), "10.96.0.1"), "expected a URL"),
        ] {
            let error = options.check().unwrap_err();
            assert!(error.contains(said), "{error}");
        }
        assert_eq!([bracketed("fd00::1"), bracketed("10.0.0.1")], ["[fd00::1]", "10.0.0.1"]);
    }
}
