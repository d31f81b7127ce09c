//! The page about every key of the configuration, from the schema of its types.

use crate::config::{Config, load};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

const INTRODUCTION: &str = "# Every key

The command `perfusion reference configuration` writes this page.
[Configuration](configuration.md) says how the daemon reads its file. A key that is absent has its
default.
";

const HEADER: &str = "| key | value | default | meaning |\n|---|---|---|---|\n";

pub(super) fn page() -> String {
    let schema = schemars::schema_for!(Config).to_value();
    Schema::new(&schema).page()
}

/// What the schema says about a key, and whether the key has to be there.
type Field<'a> = (&'a Value, bool);

/// The schema of the configuration.
struct Schema<'a> {
    root: &'a Value,
    /// How many keys have a value of each named type.
    uses: BTreeMap<&'a str, usize>,
    /// The named types of the items of lists.
    items: BTreeSet<&'a str>,
    /// The dotted names of all values, in the order of the types' fields.
    order: Vec<String>,
}

impl<'a> Schema<'a> {
    fn new(root: &'a Value) -> Self {
        let (mut uses, mut items) = (BTreeMap::new(), BTreeSet::new());
        count_uses(root, &mut uses, &mut items);
        Self { root, uses, items, order: load::keys() }
    }

    fn page(&self) -> String {
        let mut page = INTRODUCTION.to_owned();
        for (name, section) in self.fields(self.root, "") {
            let about = type_of(section.0).map_or(section.0, |name| self.definition(name));
            let mut rows = String::new();
            self.push_rows(&mut rows, name, section);
            push_table(&mut page, &format!("`{name}`"), about, &rows);
        }
        for (name, definition) in self.named() {
            let mut rows = String::new();
            for (key, field) in self.fields(definition, "") {
                self.push_rows(&mut rows, key, field);
            }
            push_table(&mut page, name, definition, &rows);
        }
        page
    }

    /// The types that have a heading of their own: several keys have them, or items of lists.
    fn named(&self) -> impl Iterator<Item = (&'a str, &'a Value)> {
        let definitions = self.root["$defs"].as_object().into_iter().flatten();
        definitions
            .map(|(name, definition)| (name.as_str(), definition))
            .filter(|(name, definition)| self.has_heading(name, definition))
    }

    fn has_heading(&self, name: &str, definition: &Value) -> bool {
        let is_section = definition["properties"].is_object()
            && self.uses.get(name) == Some(&1)
            && !self.items.contains(name);
        choices(definition).is_empty() && !is_section
    }

    fn definition(&self, name: &str) -> &'a Value {
        &self.root["$defs"][name]
    }

    /// The keys of a section, in the order of the file that `config show` prints.
    fn fields(&self, section: &'a Value, prefix: &str) -> Vec<(&'a str, Field<'a>)> {
        let required = section["required"].as_array().into_iter().flatten();
        let required: Vec<&str> = required.filter_map(Value::as_str).collect();
        let fields = section["properties"].as_object().into_iter().flatten();
        let mut fields: Vec<_> = fields
            .map(|(name, field)| (name.as_str(), (field, required.contains(&name.as_str()))))
            .collect();
        let place = |name: &str| {
            let dotted = format!("{prefix}{name}");
            self.order.iter().position(|key| {
                key.strip_prefix(&dotted)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
            })
        };
        fields.sort_by_key(|(name, _)| place(name).unwrap_or(usize::MAX));
        fields
    }

    /// One row for a key, or one for each of a section's own.
    fn push_rows(&self, rows: &mut String, key: &str, (field, is_required): Field<'a>) {
        let definition = type_of(field).map(|name| (name, self.definition(name)));
        if let Some((name, definition)) = definition
            && definition["properties"].is_object()
            && !self.has_heading(name, definition)
        {
            for (below, field) in self.fields(definition, &format!("{key}.")) {
                self.push_rows(rows, &format!("{key}.{below}"), field);
            }
            return;
        }
        let choices = definition.map(|(_, definition)| choices(definition)).unwrap_or_default();
        let mut meaning = text(field);
        for (choice, help) in &choices {
            meaning += &format!("<br>`{choice}`: {help}");
        }
        let default = match field.get("default") {
            _ if is_required => "required".to_owned(),
            // Its own keys have theirs.
            None | Some(Value::Object(_)) if definition.is_some() => String::new(),
            Some(Value::String(text)) => format!("`{text}`"),
            Some(other) => format!("`{other}`"),
            None => String::new(),
        };
        rows.push_str(&format!("| `{key}` | {} | {default} | {meaning} |\n", self.value(field)));
    }

    /// What a value is, in words.
    fn value(&self, field: &Value) -> String {
        if let Some(name) = type_of(field) {
            let definition = self.definition(name);
            let choices = choices(definition);
            return if choices.is_empty() {
                format!("[{name}](#{})", name.to_lowercase())
            } else {
                let names: Vec<String> =
                    choices.iter().map(|(choice, _)| format!("`{choice}`")).collect();
                names.join(", ")
            };
        }
        let types = match &field["type"] {
            Value::String(name) => vec![name.as_str()],
            Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        };
        let words = types.iter().map(|name| match *name {
            "array" => format!("list of {}", self.value(&field["items"])),
            "object" => "texts by name".to_owned(),
            "boolean" => "true or false".to_owned(),
            "integer" | "number" => "number".to_owned(),
            "null" => "null".to_owned(),
            _ => "text".to_owned(),
        });
        words.collect::<Vec<_>>().join(" or ")
    }
}

fn count_uses<'a>(
    value: &'a Value,
    uses: &mut BTreeMap<&'a str, usize>,
    items: &mut BTreeSet<&'a str>,
) {
    match value {
        Value::Object(fields) => {
            if let Some(name) = type_of(value) {
                *uses.entry(name).or_default() += 1;
            }
            items.extend(type_of(&value["items"]));
            fields.values().for_each(|value| count_uses(value, uses, items));
        }
        Value::Array(values) => values.iter().for_each(|value| count_uses(value, uses, items)),
        _ => {}
    }
}

/// The named type of a value.
fn type_of(value: &Value) -> Option<&str> {
    value["$ref"].as_str()?.strip_prefix("#/$defs/")
}

/// The words of a type that has a few, with their meanings.
fn choices(definition: &Value) -> Vec<(&str, String)> {
    let choices = definition["oneOf"].as_array().into_iter().flatten();
    choices.filter_map(|choice| Some((choice["const"].as_str()?, text(choice)))).collect()
}

fn push_table(page: &mut String, heading: &str, about: &Value, rows: &str) {
    page.push_str(&format!("\n## {heading}\n\n{}\n", text(about)));
    if !rows.is_empty() {
        page.push_str(&format!("\n{HEADER}{rows}"));
    }
}

/// The description of a key or type, on one line and fit for a table.
fn text(value: &Value) -> String {
    value["description"].as_str().unwrap_or_default().replace('\n', " ").replace('|', "\\|")
}
