//! The kill switch: three ways to have the daemon record nothing and attach to nothing, each for
//! whoever has no other at hand. Any one is enough, and each is undone by itself.

use std::path::Path;

/// Which of them are on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Switch {
    /// The file `limits.kill_switch` is there.
    pub file: bool,
    /// SIGUSR1 came, and no SIGUSR2 since.
    pub signal: bool,
    /// The configuration has `limits.switched_off`.
    pub config: bool,
}

impl Switch {
    /// True while nothing is recorded.
    #[must_use]
    pub fn is_off(self) -> bool {
        self.file || self.signal || self.config
    }

    /// Each with its name in metrics.
    #[must_use]
    pub fn list(self) -> [(&'static str, bool); 3] {
        [("file", self.file), ("signal", self.signal), ("config", self.config)]
    }

    /// What is on, in words; `None` when nothing is.
    #[must_use]
    pub fn text(self, file: &Path) -> Option<String> {
        let file = self.file.then(|| format!("the file {}", file.display()));
        let signal = self.signal.then(|| "SIGUSR1 (SIGUSR2 undoes it)".to_owned());
        let config = self.config.then(|| "limits.switched_off of the configuration".to_owned());
        let on: Vec<String> = [file, signal, config].into_iter().flatten().collect();
        (!on.is_empty()).then(|| format!("switched off by {}", on.join(" and ")))
    }
}

#[cfg(test)]
mod tests {
    use super::Switch;
    use std::path::Path;

    #[test]
    fn what_is_on_is_named() {
        let text = |switch: Switch| switch.text(Path::new("/run/perfusion/off"));
        assert_eq!(text(Switch::default()), None);
        assert!(!Switch::default().is_off());
        let both = Switch { file: true, config: true, signal: false };
        assert_eq!(
            text(both).as_deref(),
            Some(
                "switched off by the file /run/perfusion/off and limits.switched_off of the \
                 configuration"
            )
        );
        assert!(
            text(Switch { signal: true, ..Switch::default() })
                .is_some_and(|text| text.contains("SIGUSR2"))
        );
    }
}
