//! Which lines are logged: those of a level, or what a variable says instead.

use std::ffi::OsStr;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// The variable: a level, or filters such as `warn,perfusion_dotnet::attach=debug`.
pub const VARIABLE: &str = "PERFUSION_LOG";

/// The filter, and what is to be logged of it first. The variable goes before the level, unless
/// that was said on the command line.
#[must_use]
pub fn filter(level: &str, by_flag: bool) -> (EnvFilter, Option<String>) {
    let said = std::env::var_os(VARIABLE).filter(|_| !by_flag);
    of(level, said.as_deref())
}

fn of(level: &str, said: Option<&OsStr>) -> (EnvFilter, Option<String>) {
    match said.filter(|said| !said.is_empty()).map(|said| parsed(&said.to_string_lossy())) {
        None => (EnvFilter::new(level), None),
        Some(Ok(filter)) => (filter, None),
        Some(Err(problem)) => {
            let problem =
                format!("environment variable {VARIABLE}: {problem}; the level is {level}");
            (EnvFilter::new(level), Some(problem))
        }
    }
}

fn parsed(text: &str) -> Result<EnvFilter, String> {
    // A word alone is a module to the parser, of which all is logged, and of others nothing: a
    // misspelt level would leave no line.
    let words = text.split(',').filter(|word| !word.is_empty() && !word.contains('='));
    match words.into_iter().find(|word| word.parse::<LevelFilter>().is_err()) {
        Some(word) => Err(format!(
            "expected error, warn, info, debug, trace, off or MODULE=LEVEL, found `{word}`"
        )),
        None => EnvFilter::try_new(text).map_err(|error| {
            format!("expected filters such as warn,perfusion_dotnet::attach=debug, found {error}")
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::of;

    #[test]
    fn what_is_no_filter_is_told_and_the_level_holds() {
        let of = |said: &str| {
            let (filter, problem) = of("info", Some(said.as_ref()));
            (filter.to_string(), problem.unwrap_or_default())
        };
        assert_eq!(of(""), ("info".to_owned(), String::new()));
        assert_eq!(of("debug"), ("debug".to_owned(), String::new()));
        let (filter, problem) = of("warn,perfusion_dotnet::attach=debug");
        assert!(
            filter.contains("perfusion_dotnet::attach=debug") && problem.is_empty(),
            "{filter} {problem}"
        );
        for wrong in ["inof", "warn,perfusion_dotnet::attach", "perfusion=loud", "[=debug"] {
            let (filter, problem) = of(wrong);
            assert_eq!(filter, "info", "{wrong}");
            assert!(
                problem.contains("PERFUSION_LOG: expected")
                    && problem.ends_with("the level is info"),
                "{problem}"
            );
        }
    }
}
