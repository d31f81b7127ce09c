//! The rules of all processes, each of which is held once.

use perfusion_unwind::rule::Rule;
use std::collections::HashSet;
use std::sync::Arc;

/// Most distinct rules shared between processes.
const MAX_RULES: usize = 32_768;

/// Rules that processes share.
#[derive(Debug, Default)]
pub(super) struct InternedRules(HashSet<Arc<Rule>>);

impl InternedRules {
    /// The one copy of a rule.
    pub(super) fn intern(&mut self, rule: Rule) -> Arc<Rule> {
        if let Some(known) = self.0.get(&rule) {
            return Arc::clone(known);
        }
        if self.0.len() >= MAX_RULES {
            self.0.clear();
        }
        let rule = Arc::new(rule);
        self.0.insert(Arc::clone(&rule));
        rule
    }

    /// Forgets the rules that nobody has any more.
    pub(super) fn shed(&mut self) {
        self.0.retain(|rule| Arc::strong_count(rule) > 1);
        self.0.shrink_to_fit();
    }
}
