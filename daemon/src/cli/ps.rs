//! The arguments of `perfusion ps`.

use clap::Args;
use std::path::PathBuf;

const PS_EXAMPLES: &str = "Examples:
  perfusion ps                                               .NET processes first
  perfusion ps --json | jq '.[] | select(.mode == \"can_attach\") | .pid'";

/// `perfusion ps`.
#[derive(Debug, Args)]
#[command(after_help = PS_EXAMPLES)]
pub struct PsArgs {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// The daemon's configuration, which says where it is to be asked. Default:
    /// /etc/perfusion/perfusion.yaml.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}
