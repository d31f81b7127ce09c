//! The arguments of `perfusion report`.

use super::values::{Labels, parse_by, parse_only};
use clap::{Args, ValueEnum};
use perfusion_report::stacks::LabelFilter;
use std::path::{Path, PathBuf};

const REPORT_EXAMPLES: &str = "Examples:
  perfusion report app.pb.gz --type alloc_space              who allocates most
  perfusion report app.pb.gz --type blocked --sort cum       where threads wait, callers first
  perfusion report app.pb.gz -t blocked --by thread_name,wait_reason
  perfusion report app.pb.gz -t cpu --only thread=worker1    one thread of it
  perfusion report app.pb.gz --list 'Shop\\.ParseOrder'       its source, with what each line takes
  perfusion report app.pb.gz -f flame -o app.html            every sample type as a flame graph
  perfusion report /var/lib/perfusion/profiles/shop/*.pb.gz  what the daemon has written, as one \
     profile
  perfusion report shop/*.pb.gz -t alloc_space --by window,type -n 3
                                                             the rates of the top three types, \
     minute by minute";

/// `perfusion report`.
#[derive(Debug, Args)]
#[command(after_help = REPORT_EXAMPLES)]
pub struct ReportArgs {
    /// A pprof file, gzipped or not; - is standard input. Several are shown as one, each sample
    /// with a label `window`: when its file began. --by window shows how much is in each, and per
    /// second. What was alive (inuse_*) is that of the last moment, or of each with --by window.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Print what `record --exact` has counted. FILE is its profile, or the .exact.json beside it.
    /// Only -n and -o matter then.
    #[arg(long)]
    pub exact: bool,
    /// Sample type, for example cpu, blocked, alloc_space, inuse_space. Default: the profile's own
    /// default.
    #[arg(short = 't', long = "type", value_name = "TYPE")]
    pub sample_type: Option<String>,
    /// top: table of functions; folded: one stack a line; flame: one HTML file with all sample
    /// types. Default: top, or flame if the output's name ends in .html. It is needed if the
    /// output's name has another ending than .html and .txt.
    #[arg(short, long, value_enum)]
    pub format: Option<ReportFormat>,
    /// Rows of the top table; with --by window and more, of each window.
    #[arg(short = 'n', long, value_name = "ROWS", default_value_t = 20)]
    pub rows: usize,
    /// Order of the top table: what a function uses itself (flat), or with all it calls (cum).
    #[arg(long, value_enum, default_value_t = TopOrder::Flat)]
    pub sort: TopOrder,
    /// Sum by the values of a label instead of by functions. Examples: thread, thread_name,
    /// thread_role, process, wait_reason, waker, waker_name, type, generation, window. A label that
    /// is not there is answered with those that are. Several, separated by commas or given again: a
    /// row for each combination. (none) are samples without the label. In folded stacks and the
    /// flame graph the values are the roots. A comma in a label's name has a backslash before it:
    /// --by 'region\, zone'.
    #[arg(long, value_name = "LABEL", value_parser = parse_by)]
    pub by: Vec<Labels>,
    /// Show only what has this value of a label, for example thread=poster1, pid=4242 or
    /// wait_reason=futex. More than one: all must hold. A = in a label's name has a backslash
    /// before it.
    #[arg(long, value_name = "LABEL=VALUE", value_parser = parse_only)]
    pub only: Vec<LabelFilter>,
    /// Tell the lines of functions apart, where the profile has them.
    #[arg(long)]
    pub lines: bool,
    /// Print the source of the functions whose names match this regular expression, with what each
    /// line takes itself, and with what it calls.
    #[arg(long, value_name = "REGEX", conflicts_with_all = ["by", "format", "lines"])]
    pub list: Option<String>,
    /// Look for sources below this directory, where they are not at the path that the profile
    /// names. It may be given again.
    #[arg(long, value_name = "DIR", requires = "list")]
    pub source: Vec<PathBuf>,
    /// Write here instead of to stdout (-).
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Show threads that are parked for want of work too: pool workers, the runtime's own threads.
    /// The flame graph has them behind a switch.
    #[arg(long)]
    pub idle: bool,
}

impl ReportArgs {
    /// The labels to sum by.
    #[must_use]
    pub fn by(&self) -> Vec<String> {
        self.by.concat()
    }

    /// How it is written.
    #[must_use]
    pub fn format(&self) -> ReportFormat {
        let is_page = self.list.is_none() && self.output.as_deref().is_some_and(is_page);
        self.format.unwrap_or(if is_page { ReportFormat::Flame } else { ReportFormat::Top })
    }
}

/// True for a name whose ending says another format than those of `report`.
pub(super) fn has_unknown_ending(path: &Path) -> bool {
    let is_text = path.extension().is_none_or(|end| end.eq_ignore_ascii_case("txt"));
    !is_text && !is_page(path)
}

/// True for the name of a web page.
pub(super) fn is_page(path: &Path) -> bool {
    path.extension()
        .is_some_and(|end| end.eq_ignore_ascii_case("html") || end.eq_ignore_ascii_case("htm"))
}

/// Orders of `report`'s table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TopOrder {
    /// By a function's own value.
    Flat,
    /// By its value and that of what it calls.
    Cum,
}

/// Output formats of `report`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReportFormat {
    /// Table of functions.
    Top,
    /// One stack a line, root first, `;` between frames, a space, the value.
    Folded,
    /// One self-contained HTML file.
    Flame,
}

#[cfg(test)]
mod tests {
    use crate::cli::{Cli, CliCommand, ReportFormat, parse};
    use clap::Parser as _;

    #[test]
    fn labels_to_group_by_may_be_several() {
        let by = |words: &[&str]| match Cli::try_parse_from(
            ["perfusion", "report", "x"].iter().chain(words),
        ) {
            Ok(Cli { command: CliCommand::Report(report), .. }) => report.by(),
            other => panic!("{other:?}"),
        };
        assert_eq!(
            by(&["--by", "thread_name,wait_reason", "--by", "waker", "--by", r"region\, zone"]),
            ["thread_name", "wait_reason", "waker", "region, zone"]
        );
        assert!(by(&[]).is_empty());
    }

    #[test]
    fn the_name_of_a_page_asks_for_the_flame_graph() {
        let format = |words: &[&str]| match parse(["perfusion", "report", "x"].iter().chain(words))
        {
            Ok(Cli { command: CliCommand::Report(report), .. }) => report.format(),
            other => panic!("{other:?}"),
        };
        assert_eq!(format(&[]), ReportFormat::Top);
        assert_eq!(format(&["-o", "x.txt"]), ReportFormat::Top);
        assert_eq!(format(&["-o", "x.HTML"]), ReportFormat::Flame);
        assert_eq!(format(&["-o", "x.html", "-f", "folded"]), ReportFormat::Folded);
        assert_eq!(format(&["-o", "/dev/null"]), ReportFormat::Top);
        assert_eq!(format(&["-o", "x.svg", "-f", "top"]), ReportFormat::Top);
        assert_eq!(format(&["-o", "x.json", "--exact"]), ReportFormat::Top);
        let error = parse(["perfusion", "report", "x", "-o", "x.svg"]).unwrap_err();
        assert_eq!(error.exit_code(), 2);
        let said = error.to_string();
        assert!(["x.svg", "--format", ".html", ".txt"].iter().all(|word| said.contains(word)));
        let error = parse(["perfusion", "record", "--all", "-o", "x.html"]).unwrap_err();
        assert!(error.exit_code() == 2 && error.to_string().contains("--format flame"), "{error}");
    }
}
