//! The arguments of `perfusion config` and of the daemon, which has the same configuration.

use clap::{Args, Subcommand};
use std::path::PathBuf;

pub(super) const CONFIG_HELP: &str = "\
Flags go before the environment, the environment before the file. The variable of windows.length \
is PERFUSION_WINDOWS_LENGTH.
The daemon reads it again on SIGHUP, and keeps what it has when something is wrong. Three values \
change only when it starts again: log, limits.lower_priority and the place of the control socket \
(beside limits.kill_switch). `perfusion config schema` lists every value.";

/// Where the daemon's configuration comes from.
#[derive(Debug, Args)]
#[command(after_help = CONFIG_HELP)]
pub struct ConfigSourceArgs {
    /// The YAML file. Default: /etc/perfusion/perfusion.yaml, if it is there.
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// A value by its dotted name, such as windows.length=30s; goes before the environment and the
    /// file.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// `perfusion config check`.
#[derive(Debug, Args)]
pub struct ConfigCheckArgs {
    /// The YAML file: the same as with --config.
    #[arg(value_name = "FILE", conflicts_with = "config")]
    file: Option<PathBuf>,
    #[command(flatten)]
    sources: ConfigSourceArgs,
}

impl ConfigCheckArgs {
    /// Where the configuration comes from, the file named either way.
    #[must_use]
    pub fn sources(&self) -> ConfigSourceArgs {
        let config = self.file.as_ref().or(self.sources.config.as_ref()).cloned();
        ConfigSourceArgs { config, set: self.sources.set.clone() }
    }
}

/// `perfusion config`.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Say whether it can be used; exit code 2 and what is wrong where, if not.
    Check(ConfigCheckArgs),
    /// Print all values as one file, with where they come from.
    Show(ConfigSourceArgs),
    /// Print the JSON schema of the file.
    Schema,
}

#[cfg(test)]
mod tests {
    use crate::cli::{Cli, CliCommand, ConfigCommand, parse};

    #[test]
    fn a_configuration_is_named_with_and_without_the_option() {
        let check =
            |words: &[&str]| match parse(["perfusion", "config", "check"].iter().chain(words)) {
                Ok(Cli {
                    command: CliCommand::Config { what: ConfigCommand::Check(check) },
                    ..
                }) => Some(check.sources().config),
                _ => None,
            };
        let file = Some(Some("f.yaml".into()));
        assert_eq!(
            (check(&["f.yaml"]), check(&["-c", "f.yaml"]), check(&[])),
            (file.clone(), file, Some(None))
        );
        assert_eq!(check(&["f.yaml", "-c", "g.yaml"]), None);
    }
}
