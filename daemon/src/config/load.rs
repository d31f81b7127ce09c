//! Reads the configuration: flags before environment before file before defaults. The only user of
//! the YAML reader.
//!
//! The file is read as it is first, so that what is wrong in it is named with line and column; the
//! other two are put over it value by value, so that each is named with where it came from.

use super::{Config, InvalidValue};
use crate::log_filter;
use perfusion_dotnet::attach::policy::OPT_OUT;
use perfusion_export::receiver::Reach;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use serde_yaml::Value;
use std::ffi::OsString;
use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

/// Where the file is unless told otherwise.
pub const FILE: &str = "/etc/perfusion/perfusion.yaml";
/// No configuration is that large.
const MAX_BYTES: u64 = 1 << 20;
/// Begins the names of variables: `windows.length` is `PERFUSION_WINDOWS_LENGTH`.
const PREFIX: &str = "PERFUSION_";

/// The configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Its path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Something in the file.
    #[error("{}:{line}:{column}: {problem}", path.display())]
    Wrong {
        /// Its path.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// From 1.
        column: usize,
        /// What was expected and found, and what may have been meant.
        problem: String,
    },
    /// A value of the environment or the command line.
    #[error("{origin}: {problem}")]
    Overlay {
        /// Where it came from.
        origin: String,
        /// What was expected and found, and what may have been meant.
        problem: String,
    },
    /// Values that do not fit, wherever they came from.
    #[error("{origin}: {key}: {problem}")]
    Unfit {
        /// Where the value came from.
        origin: String,
        /// Its name.
        key: &'static str,
        /// What was expected and found.
        problem: String,
    },
}

/// Where values come from.
#[derive(Clone, Debug, Default)]
pub struct ValueSources {
    /// The file; `None`: [`FILE`], if it is there.
    pub file: Option<PathBuf>,
    /// `KEY=VALUE` of the command line.
    pub flags: Vec<String>,
}

/// A value that did not come from the file: its name, the value, and what it is called in messages.
struct Overlay {
    key: String,
    text: String,
    origin: String,
}

/// A configuration and where its values came from.
#[derive(Clone, Debug)]
pub struct LoadedConfig {
    /// The values.
    pub config: Config,
    /// The file that was read.
    pub file: Option<PathBuf>,
    /// Keys that did not come from the file, and where they came from.
    pub overlaid: Vec<(String, String)>,
    /// What was not refused and is hardly meant, one line each.
    pub remarks: Vec<String>,
}

impl LoadedConfig {
    /// Logs the remarks.
    pub fn warn(&self) {
        for remark in &self.remarks {
            tracing::warn!("{remark}");
        }
    }
}

impl ValueSources {
    /// True when the command line says the value with this dotted name.
    #[must_use]
    pub fn flags_say(&self, key: &str) -> bool {
        self.flags.iter().any(|flag| flag.split_once('=').is_some_and(|(said, _)| said == key))
    }

    /// Reads all of them.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn load(&self) -> Result<LoadedConfig, ConfigError> {
        self.load_with(std::env::vars_os())
    }

    fn load_with(
        &self,
        environment: impl Iterator<Item = (OsString, OsString)>,
    ) -> Result<LoadedConfig, ConfigError> {
        let file = match &self.file {
            Some(file) => Some(file.clone()),
            None => Some(PathBuf::from(FILE)).filter(|file| file.exists()),
        };
        let text = file.as_deref().map(read).transpose()?.unwrap_or_default();
        let shown = file.clone().unwrap_or_else(|| PathBuf::from("the defaults"));
        let (mut value, mut config) = parse(&text, &shown)?;
        let (mut overlays, mut remarks) = from_environment(environment)?;
        overlays
            .extend(self.flags.iter().map(|flag| from_flag(flag)).collect::<Result<Vec<_>, _>>()?);
        for Overlay { key, text, origin } in &overlays {
            let wrong = |problem| ConfigError::Overlay { origin: origin.clone(), problem };
            let new: Value = serde_yaml::from_str(text).map_err(|error| wrong(explain(&error)))?;
            let is_scalar = new.is_number() || new.is_bool() || new.is_null();
            put(&mut value, key, new).map_err(wrong)?;
            config = match serde_yaml::from_value(value.clone()) {
                Ok(read) => read,
                Err(error) => {
                    // A node may be called 12345, and a version 1.10: what YAML takes for a number
                    // is a text where one is wanted.
                    let as_text =
                        if is_scalar { text.trim() } else { return Err(wrong(explain(&error))) };
                    put(&mut value, key, Value::String(as_text.to_owned())).map_err(wrong)?;
                    serde_yaml::from_value(value.clone()).map_err(|_| wrong(explain(&error)))?
                }
            };
        }
        config.check().map_err(|InvalidValue { key, problem }| {
            let origin = match overlays.iter().rfind(|overlay| overlay.key == key) {
                Some(overlay) => overlay.origin.clone(),
                None => match place(&text, key) {
                    Some((line, column)) => format!("{}:{line}:{column}", shown.display()),
                    None => shown.display().to_string(),
                },
            };
            ConfigError::Unfit { origin, key, problem }
        })?;
        remarks.extend(config.remarks());
        let overlaid = overlays.into_iter().map(|overlay| (overlay.key, overlay.origin)).collect();
        Ok(LoadedConfig { config, file, overlaid, remarks })
    }
}

fn read(path: &Path) -> Result<String, ConfigError> {
    let failed = |source| ConfigError::Read { path: path.to_owned(), source };
    let mut text = String::new();
    File::open(path)
        .and_then(|file| file.take(MAX_BYTES + 1).read_to_string(&mut text))
        .map_err(failed)?;
    if u64::try_from(text.len()).is_ok_and(|bytes| bytes > MAX_BYTES) {
        return Err(failed(io::Error::other("more than 1 MiB: no configuration of perfusion")));
    }
    Ok(text)
}

fn parse(text: &str, path: &Path) -> Result<(Value, Config), ConfigError> {
    let wrong = |error: serde_yaml::Error| {
        let (line, column) = error.location().map_or((1, 1), |at| (at.line(), at.column()));
        ConfigError::Wrong { path: path.to_owned(), line, column, problem: explain(&error) }
    };
    // A file of comments only is an empty one.
    let value: Value = serde_yaml::from_str(text).map_err(wrong)?;
    if value.is_null() {
        return Ok((Value::Mapping(serde_yaml::Mapping::new()), Config::default()));
    }
    let config = serde_yaml::from_str(text).map_err(wrong)?;
    Ok((value, config))
}

/// Line and column in the file where the value with this dotted name stands, or what it is in.
/// `None` when it does not stand there.
fn place(text: &str, key: &str) -> Option<(usize, usize)> {
    // The reader tells places with its errors only: it is made to fail at the value.
    let error = ValueLocator(key).deserialize(serde_yaml::Deserializer::from_str(text)).err()?;
    error.location().map(|at| (at.line(), at.column()))
}

/// Fails at the value with this dotted name, which is here when it is empty; at text and numbers by
/// [`Visitor`]'s own methods.
struct ValueLocator<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for ValueLocator<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, reader: D) -> Result<(), D::Error> {
        reader.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ValueLocator<'_> {
    type Value = ();

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a section")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        if self.0.is_empty() {
            return Err(A::Error::custom("here"));
        }
        let (section, rest) = self.0.split_once('.').unwrap_or((self.0, ""));
        while let Some(name) = map.next_key::<Value>()? {
            if name.as_str() == Some(section) {
                map.next_value_seed(ValueLocator(rest))?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        if self.0.is_empty() { Err(E::custom("here")) } else { Ok(()) }
    }
}

/// What is wrong, without its place, and with what may have been meant.
fn explain(error: &serde_yaml::Error) -> String {
    let text = error.to_string();
    let text = text.rsplit_once(" at line ").map_or(text.as_str(), |(before, _)| before);
    let mut quoted = text.split('`').skip(1).step_by(2);
    let known = text.contains("unknown field") || text.contains("unknown variant");
    match quoted.next().filter(|_| known) {
        Some(found) => format!("{text}{}", nearest(found, quoted)),
        None => text.to_owned(),
    }
}

/// `; did you mean …?` when one of `known` is close to what was found.
fn nearest<'a>(found: &str, known: impl Iterator<Item = &'a str>) -> String {
    near(found, known).map(|name| format!("; did you mean `{name}`?")).unwrap_or_default()
}

/// The closest of `known`, when that is close to what was found.
fn near<'a>(found: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let (distance, name) =
        known.map(|name| (strsim::damerau_levenshtein(found, name), name)).min()?;
    (distance <= 1 + name.len() / 4).then_some(name)
}

/// The dotted names of all values.
#[must_use]
pub fn keys() -> Vec<String> {
    let mut keys = Vec::new();
    if let Ok(value) = serde_yaml::to_value(Config::default()) {
        leaves(&value, "", &mut keys);
    }
    keys
}

fn leaves(value: &Value, name: &str, keys: &mut Vec<String>) {
    match value {
        Value::Mapping(mapping) if !mapping.is_empty() => {
            for (key, value) in mapping {
                let key = key.as_str().unwrap_or_default();
                leaves(
                    value,
                    &if name.is_empty() { key.to_owned() } else { format!("{name}.{key}") },
                    keys,
                );
            }
        }
        _ => keys.push(name.to_owned()),
    }
}

fn variable(key: &str) -> String {
    format!("{PREFIX}{}", key.replace('.', "_").to_uppercase())
}

/// The name of a variable without what all of them begin with.
fn bare(variable: &str) -> &str {
    variable.strip_prefix(PREFIX).unwrap_or(variable)
}

/// Variables that name a value, and remarks upon those that nearly do. One that begins like a
/// section and names none is a mistake.
fn from_environment(
    environment: impl Iterator<Item = (OsString, OsString)>,
) -> Result<(Vec<Overlay>, Vec<String>), ConfigError> {
    let keys: Vec<(String, String)> = keys().into_iter().map(|key| (variable(&key), key)).collect();
    let sections: Vec<String> = keys
        .iter()
        .filter_map(|(_, key)| Some(format!("{}_", variable(key.split_once('.')?.0))))
        .collect();
    let (mut overlays, mut remarks) = (Vec::new(), Vec::new());
    for (name, text) in environment {
        let Some(name) = name.to_str().filter(|name| name.starts_with(PREFIX)) else { continue };
        let origin = format!("environment variable {name}");
        match keys.iter().find(|(variable, _)| variable == name) {
            Some((_, key)) => {
                let text = text.to_string_lossy().into_owned();
                overlays.push(Overlay { key: key.clone(), text, origin });
            }
            None if is_ours(name) => {}
            None if sections.iter().any(|section| name.starts_with(section)) => {
                let meant = nearest(name, keys.iter().map(|(variable, _)| variable.as_str()));
                return Err(ConfigError::Overlay {
                    origin,
                    problem: format!("there is no such value{meant}"),
                });
            }
            None => {
                // It may be somebody else's. By what they begin with all names are alike.
                let meant = near(bare(name), keys.iter().map(|(variable, _)| bare(variable)));
                remarks.extend(meant.map(|meant| {
                    format!(
                        "{origin} is left out: there is no such value; did you mean \
                         `{PREFIX}{meant}`?"
                    )
                }));
            }
        }
    }
    // In the same order whatever the environment's is.
    overlays.sort_by(|a, b| a.key.cmp(&b.key));
    remarks.sort();
    Ok((overlays, remarks))
}

/// Variables of this project with another meaning.
fn is_ours(name: &str) -> bool {
    [OPT_OUT, log_filter::VARIABLE].contains(&name)
}

fn from_flag(flag: &str) -> Result<Overlay, ConfigError> {
    // Its value may be a receiver's with tokens in its headers.
    let origin = format!("--set {}", flag.split_once('=').map_or(flag, |(key, _)| key));
    let wrong = |problem: String| ConfigError::Overlay { origin: origin.clone(), problem };
    let (key, text) = flag.split_once('=').ok_or_else(|| wrong("expected KEY=VALUE".to_owned()))?;
    let keys = keys();
    if !keys.iter().any(|known| known == key || key.starts_with("services.labels.")) {
        let meant = nearest(key, keys.iter().map(String::as_str));
        return Err(wrong(format!("there is no value `{key}`{meant}")));
    }
    Ok(Overlay { key: key.to_owned(), text: text.to_owned(), origin })
}

/// Sets the value with this dotted name.
fn put(value: &mut Value, key: &str, new: Value) -> Result<(), String> {
    let mut at = value;
    // A label's own name has dots.
    let parts: Vec<&str> = match key.strip_prefix("services.labels.") {
        Some(label) => vec!["services", "labels", label],
        None => key.split('.').collect(),
    };
    for part in parts {
        if !at.is_mapping() {
            *at = Value::Mapping(serde_yaml::Mapping::new());
        }
        let Some(mapping) = at.as_mapping_mut() else { return Err("not a section".to_owned()) };
        at = mapping.entry(Value::String(part.to_owned())).or_insert(Value::Null);
    }
    *at = new;
    Ok(())
}

/// The configuration as a file, with the origin of what did not come from the file read. Values of
/// receivers' headers are left out, since they may be secret.
#[must_use]
pub fn show(loaded: &LoadedConfig) -> String {
    let mut text = match &loaded.file {
        Some(file) => format!("# from {} and the defaults\n", file.display()),
        None => "# the defaults\n".to_owned(),
    };
    for (key, origin) in &loaded.overlaid {
        // What was given is below. Writing to a String cannot fail.
        let origin = origin.split_once('=').map_or(origin.as_str(), |(origin, _)| origin);
        writeln!(text, "# {key} from {origin}").ok();
    }
    let mut config = loaded.config.clone();
    let servers = config.pyroscope.iter_mut().map(|server| &mut server.reach);
    config.otlp.iter_mut().map(|receiver| &mut receiver.reach).chain(servers).for_each(Reach::hide);
    // Its types have no form that YAML lacks.
    text += &serde_yaml::to_string(&config).unwrap_or_default();
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::proptest;

    fn load(
        text: &str,
        environment: &[(&str, &str)],
        flags: &[&str],
    ) -> Result<LoadedConfig, ConfigError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let sources = ValueSources {
            file: Some(file.path().to_owned()),
            flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
        };
        sources.load_with(environment.iter().map(|(name, value)| ((*name).into(), (*value).into())))
    }

    fn error(text: &str, environment: &[(&str, &str)], flags: &[&str]) -> String {
        load(text, environment, flags).unwrap_err().to_string()
    }

    #[test]
    fn a_number_is_a_text_where_a_text_is_wanted() {
        let flags = ["services.labels.version=1.10", "services.labels.build=5e3"];
        let loaded = load("", &[("PERFUSION_KUBERNETES_NODE", "12345")], &flags).unwrap().config;
        assert_eq!(loaded.kubernetes.node.as_deref(), Some("12345"));
        assert_eq!(loaded.services.labels["version"], "1.10");
        assert_eq!(loaded.services.labels["build"], "5e3");
        let error = load("", &[], &["recording.frequency=true"]).unwrap_err().to_string();
        assert!(error.contains("boolean"), "{error}");
    }

    #[test]
    fn flags_come_before_the_environment_before_the_file_before_the_defaults() {
        let text = "windows:\n  length: 10s\n";
        let environment = [("PERFUSION_WINDOWS_LENGTH", "20s")];
        let length = |environment: &[(&str, &str)], flags: &[&str]| {
            load(text, environment, flags).unwrap().config.windows.length.to_string()
        };
        assert_eq!(length(&[], &[]), "10s");
        assert_eq!(length(&environment, &[]), "20s");
        assert_eq!(length(&environment, &["windows.length=30s"]), "30s");
        assert_eq!(load("# nothing\n", &[], &[]).unwrap().config, Config::default());
        let lists = load("", &[], &["attach.services=[a, b]", "attach.policy=listed"])
            .unwrap()
            .config
            .attach;
        assert_eq!(lists.services, ["a", "b"]);
    }

    #[test]
    fn an_unknown_key_is_refused_with_its_place_and_what_may_have_been_meant() {
        let text = error("windows:\n  length: 10s\nfiles:\n  max_aeg: 1d\n", &[], &[]);
        assert!(text.contains(":4:3: "), "{text}");
        assert!(text.contains("`max_aeg`") && text.ends_with("did you mean `max_age`?"), "{text}");
        let text = error("windos: {}\n", &[], &[]);
        assert!(text.contains(":1:1: ") && text.contains("did you mean `windows`?"), "{text}");
        let text = error("attach:\n  policy: al\n", &[], &[]);
        assert!(text.contains(":2:") && text.contains("did you mean `all`?"), "{text}");
        let text = error("", &[], &["windows.lenght=1m"]);
        assert!(text.contains("did you mean `windows.length`?"), "{text}");
        let text = error("", &[("PERFUSION_WINDOWS_LENGHT", "1m")], &[]);
        assert!(text.contains("did you mean `PERFUSION_WINDOWS_LENGTH`?"), "{text}");
    }

    #[test]
    fn a_wrong_value_is_refused_with_where_it_came_from() {
        let text = error("windows:\n  length: soon\n", &[], &[]);
        assert!(text.contains(":2:") && text.contains("`soon` is no length of time"), "{text}");
        let text = error("", &[("PERFUSION_FILES_MAX_SIZE", "huge")], &[]);
        assert!(text.starts_with("environment variable PERFUSION_FILES_MAX_SIZE: "), "{text}");
        let text = error("", &[], &["recording.frequency=0"]);
        assert!(
            text.contains("--set recording.frequency: ") && text.contains("expected 1 to 10000"),
            "{text}"
        );
        let text = error("files:\n  directory: relative\n", &[], &[]);
        assert!(text.contains("expected an absolute path"), "{text}");
        let text = error(
            "# first\nwindows: {length: 1m}\nrecording:\n  spans: true\n  frequency: 0\n",
            &[],
            &[],
        );
        assert!(text.contains(":5:14: recording.frequency: expected 1 to 10000"), "{text}");
        assert!(error("a: [", &[], &[]).contains(":1:"));
        assert!(error("windows: {length: 1m, length: 2m}", &[], &[]).contains("duplicate"));
    }

    /// In the packaged file a value that is commented out begins with `#` and no blank, or with the
    /// two of its section.
    #[test]
    fn the_packaged_file_has_every_value_with_its_default() {
        let packaged = include_str!("../../../packaging/perfusion.yaml");
        let plain = |line: &str| match line.strip_prefix('#') {
            Some(value) if !value.starts_with(' ') || value.starts_with("  ") => value.to_owned(),
            _ => line.to_owned(),
        };
        let all: Vec<String> = packaged.lines().map(plain).collect();
        let mut expected = Config::default();
        expected.files.directory = Some("/var/lib/perfusion/profiles".into());
        expected.spool.directory = Some("/var/lib/perfusion/spool".into());
        for text in [packaged, &all.join("\n")] {
            assert_eq!(load(text, &[], &[]).unwrap().config, expected, "{text}");
        }
        let value: Value = serde_yaml::from_str(&all.join("\n")).unwrap();
        let mut named = Vec::new();
        leaves(&value, "", &mut named);
        let (mut named, mut known) = (named, keys());
        named.sort();
        known.sort();
        assert_eq!(named, known);
    }

    #[test]
    fn what_is_shown_is_read_back() {
        let loaded =
            load("services:\n  labels: {team: a}\n", &[], &["files.directory=/x"]).unwrap();
        let shown = show(&loaded);
        assert!(shown.contains("# files.directory from --set files.directory\n"), "{shown}");
        assert_eq!(load(&shown, &[], &[]).unwrap().config, loaded.config);
    }

    #[test]
    fn values_of_headers_are_not_shown() {
        let text = "spool: {directory: /s}\notlp: \
             [{url: \"http://a\", reach: {headers: {x-api-key: abracadabra}}}]\n";
        let server =
            "pyroscope=[{url: \"http://b\", reach: {headers: {x-scope-orgid: open-sesame}}}]";
        let loaded = load(text, &[], &[server]).unwrap();
        let shown = show(&loaded);
        assert!(
            shown.contains("x-api-key: (hidden)") && shown.contains("x-scope-orgid: (hidden)"),
            "{shown}"
        );
        assert!(!shown.contains("abracadabra") && !shown.contains("open-sesame"), "{shown}");
        assert_eq!(loaded.config.otlp[0].reach.headers["x-api-key"], "abracadabra");
    }

    #[test]
    fn variables_that_are_no_values_are_left_alone_unless_they_look_like_one() {
        assert!(
            load(
                "",
                &[("PERFUSION_ATTACH", "off"), ("PERFUSION_LOG", "debug"), ("PATH", "x")],
                &[]
            )
            .is_ok()
        );
    }

    #[test]
    fn a_variable_of_a_misspelt_section_is_left_out_with_what_may_have_been_meant() {
        let variables = [
            "PERFUSION_WINDOW_LENGTH",
            "PERFUSION_BIN",
            "PERFUSION_PROBES",
            "PERFUSION_SERVICE_HOST",
        ];
        let text = "files: {directory: /x}\n";
        let loaded = load(text, &variables.map(|name| (name, "10s")), &[]).unwrap();
        assert_eq!(loaded.config, load(text, &[], &[]).unwrap().config);
        assert_eq!(
            loaded.remarks,
            ["environment variable PERFUSION_WINDOW_LENGTH is left out: there is no such value; \
                 did you mean `PERFUSION_WINDOWS_LENGTH`?"]
        );
    }

    #[test]
    fn a_flag_says_a_value_by_its_whole_name() {
        let sources = ValueSources { file: None, flags: vec!["log.level=debug".to_owned()] };
        assert!(sources.flags_say("log.level") && !sources.flags_say("log"));
    }

    #[test]
    fn every_key_has_a_default_and_a_place_in_the_schema() {
        let schema = serde_json::to_value(schemars::schema_for!(Config)).unwrap();
        let properties = |name: &str| {
            let node = schema["properties"]
                .get(name)
                .unwrap_or_else(|| panic!("{name} is not in the schema"));
            node.get("$ref").map(|path| {
                let name = path.as_str().unwrap().rsplit('/').next().unwrap();
                schema["$defs"][name]["properties"].clone()
            })
        };
        for key in keys() {
            let Some((section, name)) = key.split_once('.') else {
                // A list stands for itself.
                assert!(schema["properties"].get(&key).is_some(), "{key}");
                continue;
            };
            // Deeper ones by the one they are in.
            let name = name.split('.').next().unwrap();
            assert!(properties(section).unwrap().get(name).is_some(), "{key}");
        }
        assert_eq!(schema["additionalProperties"], false);
    }

    /// What a schema asks for, without its words and defaults.
    fn bare(node: &serde_json::Value) -> serde_json::Value {
        use serde_json::Value as Json;
        match node {
            Json::Object(fields) => {
                let asked = fields.iter().filter(|(name, _)| {
                    !matches!(name.as_str(), "description" | "default" | "title" | "$schema")
                });
                let of = |(name, value): (&String, &Json)| match (name.as_str(), value) {
                    // Here names are of values and types.
                    ("properties" | "$defs", Json::Object(named)) => {
                        let named = named.iter().map(|(name, value)| (name.clone(), bare(value)));
                        (name.clone(), Json::Object(named.collect()))
                    }
                    _ => (name.clone(), bare(value)),
                };
                Json::Object(asked.map(of).collect())
            }
            Json::Array(list) => Json::Array(list.iter().map(bare).collect()),
            _ => node.clone(),
        }
    }

    #[test]
    fn the_chart_refuses_what_the_daemon_would() {
        let chart: serde_json::Value =
            serde_json::from_str(include_str!("../../../helm/values.schema.json")).unwrap();
        let mut own = bare(&serde_json::to_value(schemars::schema_for!(Config)).unwrap());
        let types = own.as_object_mut().unwrap().remove("$defs").unwrap();
        assert_eq!(
            chart["properties"]["config"], own,
            "helm/values.schema.json, `config`: expected\n{own}"
        );
        assert_eq!(chart["$defs"], types, "helm/values.schema.json, `$defs`: expected\n{types}");
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".{0,200}", flag in ".{0,50}") {
            load(&text, &[], &[&flag]).ok();
        }
    }
}
