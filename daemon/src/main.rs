//! Parse, run, exit code. The one place where an error becomes text and a number.

mod embedded;

use perfusion::cli::{self, CliCommand, ConfigCommand, InspectCommand, SymbolsCommand, exit};
use perfusion::error::say;
use perfusion::log_filter;
use std::io::IsTerminal as _;
use std::process::ExitCode;

fn main() -> ExitCode {
    perfusion_artefacts::provide(embedded::artefacts());
    let cli = match cli::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are answers, not errors; clap knows which stream each belongs to.
            let code = if error.use_stderr() { exit::USAGE } else { 0 };
            return if error.print().is_ok() {
                ExitCode::from(code)
            } else {
                ExitCode::from(exit::OTHER)
            };
        }
    };
    let level = match (cli.quiet, cli.verbose) {
        (true, _) => "error",
        (_, 0) => "warn",
        (_, 1) => "info",
        _ => "debug",
    };
    // The daemon's configuration says how it logs, unless that is said here.
    let logs_at =
        (cli.quiet || cli.verbose > 0).then_some(if cli.quiet { "error" } else { "debug" });
    if !matches!(cli.command, CliCommand::Daemon(_)) {
        let (filter, problem) = log_filter::filter(level, cli.quiet || cli.verbose > 0);
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none())
            .without_time()
            .with_target(false)
            // It would end the program when stderr cannot be written.
            .log_internal_errors(false)
            .init();
        // Whoever starts one of ours has said so.
        let is_internal =
            matches!(cli.command, CliCommand::AttachHelper | CliCommand::ExecWhenReady(_));
        if let Some(problem) = problem.filter(|_| !is_internal) {
            tracing::error!("{problem}");
        }
    }
    // The child that becomes another program leaves signals as it found them.
    if !matches!(cli.command, CliCommand::ExecWhenReady(_))
        && let Err(source) = perfusion::error::outlive_long_files()
    {
        let error = perfusion::error::Error::Internal { what: "signal handler", source };
        say(&format!("perfusion: {}", perfusion_host::system_limits::explain(&error)));
        return ExitCode::from(exit::OTHER);
    }
    let done = match &cli.command {
        CliCommand::Record(options) => perfusion::commands::record::record(options, cli.quiet),
        CliCommand::Report(options) => perfusion::commands::report::report(options, cli.quiet),
        CliCommand::Dump(options) => perfusion::commands::dump::dump(options, cli.quiet),
        CliCommand::Leaks(options) => perfusion::commands::leaks::leaks(options, cli.quiet),
        CliCommand::Heap(options) => perfusion::commands::heap::heap(options, cli.quiet),
        CliCommand::Ps(options) => perfusion::commands::ps::ps(options),
        CliCommand::Doctor(options) => perfusion::commands::doctor::doctor(options.json),
        CliCommand::Daemon(sources) => perfusion::daemon::daemon(sources, logs_at),
        CliCommand::Config { what: ConfigCommand::Check(sources) } => {
            perfusion::commands::config::check(&sources.sources())
        }
        CliCommand::Config { what: ConfigCommand::Show(sources) } => {
            perfusion::commands::config::show(sources)
        }
        CliCommand::Config { what: ConfigCommand::Schema } => perfusion::commands::config::schema(),
        CliCommand::Inspect { what: InspectCommand::Unwind(options) } => {
            perfusion::commands::inspect::unwind(options)
        }
        CliCommand::Symbols { what: SymbolsCommand::Fetch(options) } => {
            perfusion::commands::symbols::fetch(options, cli.quiet)
        }
        CliCommand::Symbols { what: SymbolsCommand::Check(options) } => {
            perfusion::commands::symbols::check(options)
        }
        CliCommand::Completions { shell } => perfusion::commands::manual::completions(*shell),
        CliCommand::Man { directory } => perfusion::commands::manual::pages(directory),
        CliCommand::Reference { page } => perfusion::commands::reference::reference(*page),
        CliCommand::AttachHelper => perfusion::commands::internal::attach_helper(),
        CliCommand::Copy { from, to } => perfusion::commands::internal::copy(from, to),
        CliCommand::ExecWhenReady(options) => {
            let error = perfusion_sources::launch::exec_when_ready(&options.command);
            let why = perfusion_host::system_limits::explain(&error);
            say(&format!("perfusion: cannot start {}: {why}", options.command.join(" ")));
            return ExitCode::from(exit::COMMAND);
        }
    };
    match done {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            say(&format!("perfusion: {}", perfusion_host::system_limits::explain(&error)));
            ExitCode::from(error.exit_code())
        }
    }
}
