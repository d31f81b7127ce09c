//! The pages of the documentation that are made from the program's own types: the options of the
//! command line and the keys of the configuration. They cannot say anything else than the program.

mod command_line;
mod configuration;

use super::output::to_stdout;
use crate::cli::ReferencePage;
use crate::error::Error;

/// `perfusion reference`.
///
/// # Errors
/// When the page cannot be written.
pub fn reference(page: ReferencePage) -> Result<u8, Error> {
    let text = match page {
        ReferencePage::CommandLine => command_line::page(),
        ReferencePage::Configuration => configuration::page(),
    };
    to_stdout(text.as_bytes())?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::{command_line, configuration};
    use std::path::Path;

    fn is_current(page: &str, name: &str, file: &str) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(file);
        let committed = std::fs::read_to_string(path).unwrap_or_default();
        assert!(committed == page, "docs/{file} differs: perfusion reference {name} > docs/{file}");
    }

    #[test]
    fn the_documentation_has_every_argument_of_the_command_line() {
        is_current(&command_line::page(), "command-line", "cli.md");
    }

    #[cfg(feature = "object-storage")]
    #[test]
    fn the_documentation_has_every_key_of_the_configuration() {
        is_current(&configuration::page(), "configuration", "configuration-keys.md");
    }
}
