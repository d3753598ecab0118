//! Which parts of a request make its fingerprint, and in what form.
//!
//! Each part goes in under its name and framed by its length, so that no two requests that differ in a chosen part give
//! the same input to the digest. The input begins with the version of the recipe; what it is made of is frozen by
//! golden values in the tests.

use http::Uri;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderName};
use http::request::Parts;

use super::json::canonical;
use super::media_type;
use crate::key::Fingerprint;

/// The version of the recipe, the first part of every fingerprint. Frozen.
const VERSION: &str = "keyonce http recipe 1";

/// Which parts of a request must be the same on a retry.
///
/// By default the method, the path, the query, the content type (with the content encoding) and the body, each byte for
/// byte. What a service leaves out may differ between two requests that it treats as one.
///
/// A recipe is part of what is remembered: a retry under another recipe is a mismatch. When a release changes it, name
/// the earlier one in [`IdempotencyLayer::accept_also`](super::IdempotencyLayer::accept_also) for as long as keys are
/// kept.
///
/// ```
/// use keyonce::http::Recipe;
///
/// let recipe = Recipe::new().without_query().header(http::HeaderName::from_static("x-currency"));
/// assert_ne!(recipe, Recipe::new());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a recipe does nothing until a layer is given it"]
pub struct Recipe {
    method: bool,
    path: bool,
    query: bool,
    content_type: bool,
    body: BodyPart,
    headers: Vec<HeaderName>,
}

/// How the body takes part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BodyPart {
    Left,
    Bytes,
    Json,
}

impl Recipe {
    /// Method, path, query, content type and body.
    pub fn new() -> Self {
        Self { method: true, path: true, query: true, content_type: true, body: BodyPart::Bytes, headers: Vec::new() }
    }

    /// The method may differ.
    pub fn without_method(self) -> Self {
        Self { method: false, ..self }
    }

    /// The path may differ. What counts as the path is what the layer sees of it, in a nested router of axum's without
    /// the prefix, unless [`uri`](super::IdempotencyLayer::uri) tells it the whole.
    pub fn without_path(self) -> Self {
        Self { path: false, ..self }
    }

    /// The query may differ.
    pub fn without_query(self) -> Self {
        Self { query: false, ..self }
    }

    /// `Content-Type` and `Content-Encoding` may differ.
    pub fn without_content_type(self) -> Self {
        Self { content_type: false, ..self }
    }

    /// The body may differ.
    pub fn without_body(self) -> Self {
        Self { body: BodyPart::Left, ..self }
    }

    /// A body whose content type is JSON counts by what it says: the order of members, white space and the way that
    /// characters are escaped do not count. Numbers count as they are written, digit by digit, so none is ever rounded
    /// and `1.0` is not `1`.
    ///
    /// A body that is not valid JSON, has a member twice, or is nested more than 32 deep counts byte for byte.
    pub fn canonical_json(self) -> Self {
        Self { body: BodyPart::Json, ..self }
    }

    /// A request header counts, too: all its lines, in order.
    pub fn header(mut self, name: HeaderName) -> Self {
        self.headers.push(name);
        self
    }

    /// The fingerprint of a request by this recipe.
    pub fn fingerprint(&self, parts: &Parts, body: &[u8]) -> Fingerprint {
        self.fingerprint_at(&parts.uri, parts, body)
    }

    /// The fingerprint of a request that was sent to this address.
    pub(super) fn fingerprint_at(&self, uri: &Uri, parts: &Parts, body: &[u8]) -> Fingerprint {
        let mut head = self.head(uri, parts);
        let json = match self.body {
            BodyPart::Left => return Fingerprint::of(head),
            BodyPart::Bytes => None,
            BodyPart::Json => Some(body).filter(|_| is_json(parts)).and_then(canonical),
        };
        frame(&mut head, if json.is_some() { "json" } else { "body" });
        Fingerprint::of_parts([&head, json.as_deref().unwrap_or(body)])
    }

    /// The version and the chosen parts but the body, each framed by its length.
    fn head(&self, uri: &Uri, parts: &Parts) -> Vec<u8> {
        let mut head = Vec::with_capacity(256);
        frame(&mut head, VERSION);
        if self.method {
            frame(&mut head, "method");
            frame(&mut head, parts.method.as_str());
        }
        if self.path {
            frame(&mut head, "path");
            frame(&mut head, uri.path());
        }
        if self.query {
            // A query that is empty is another request target than none.
            frame(&mut head, if uri.query().is_some() { "query" } else { "no query" });
            frame(&mut head, uri.query().unwrap_or_default());
        }
        if self.content_type {
            lines(&mut head, parts, &CONTENT_TYPE);
            lines(&mut head, parts, &CONTENT_ENCODING);
        }
        for name in &self.headers {
            lines(&mut head, parts, name);
        }
        head
    }
}

impl Default for Recipe {
    fn default() -> Self {
        Self::new()
    }
}

/// Adds all lines of a header, under its name and with their number.
fn lines(head: &mut Vec<u8>, parts: &Parts, name: &HeaderName) {
    let values = parts.headers.get_all(name);
    frame(head, "header");
    frame(head, name.as_str());
    frame(head, values.iter().count().to_string());
    for value in values {
        frame(head, value);
    }
}

/// Adds a part and its length before it.
fn frame(head: &mut Vec<u8>, part: impl AsRef<[u8]>) {
    let part = part.as_ref();
    head.extend(u64::try_from(part.len()).expect("a length in memory fits 64 bits").to_le_bytes());
    head.extend_from_slice(part);
}

/// Whether a request says that its body is JSON, as it stands on the wire.
fn is_json(parts: &Parts) -> bool {
    let said = media_type(&parts.headers);
    let json = said.eq_ignore_ascii_case("application/json") || said.to_ascii_lowercase().ends_with("+json");
    json && !parts.headers.contains_key(CONTENT_ENCODING)
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn request(method: &str, uri: &str, content_type: &str) -> Parts {
        let request = Request::builder().method(method).uri(uri).header("content-type", content_type);
        request.body(()).unwrap().into_parts().0
    }

    fn hex(fingerprint: Fingerprint) -> String {
        fingerprint.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn the_recipe_is_frozen() {
        let parts = request("POST", "/charges?currency=eur", "application/json");
        let body = br#"{"amount": 999}"#;
        let few = Recipe::new().without_query().without_body().header(CONTENT_TYPE);
        let golden = [
            (Recipe::new(), "90763bd41d4519c5ca8ac3818b4fbf84"),
            (Recipe::new().canonical_json(), "f7431fae5980383c2e88ede25edede3a"),
            (few, "00b3724d64a4f0223bc737d6e1e3a73b"),
        ];
        let made = golden.clone().map(|(recipe, _)| hex(recipe.fingerprint(&parts, body)));
        assert_eq!(made, golden.map(|(_, golden)| golden));
    }

    #[test]
    fn each_part_counts_and_only_if_it_is_chosen() {
        let of = |recipe: &Recipe, method, uri, content_type, body: &str| {
            recipe.fingerprint(&request(method, uri, content_type), body.as_bytes())
        };
        let all = Recipe::new();
        let one = of(&all, "POST", "/a?q=1", "text/plain", "body");
        let others = [
            ("PATCH", "/a?q=1", "text/plain", "body", Recipe::new().without_method()),
            ("POST", "/b?q=1", "text/plain", "body", Recipe::new().without_path()),
            ("POST", "/a?q=2", "text/plain", "body", Recipe::new().without_query()),
            ("POST", "/a", "text/plain", "body", Recipe::new().without_query()),
            ("POST", "/a?", "text/plain", "body", Recipe::new().without_query()),
            ("POST", "/a?q=1", "text/html", "body", Recipe::new().without_content_type()),
            ("POST", "/a?q=1", "text/plain", "bodY", Recipe::new().without_body()),
        ];
        for (method, uri, content_type, body, without) in others {
            assert_ne!(of(&all, method, uri, content_type, body), one, "{method} {uri} {content_type} {body}");
            let same = of(&without, "POST", "/a?q=1", "text/plain", "body");
            assert_eq!(of(&without, method, uri, content_type, body), same, "{without:?}");
        }
    }

    #[test]
    fn json_counts_by_what_it_says_only_where_that_was_chosen_and_the_type_is_json() {
        let recipe = Recipe::new().canonical_json();
        let of = |recipe: &Recipe, content_type: &str, body: &str| {
            recipe.fingerprint(&request("POST", "/", content_type), body.as_bytes())
        };
        let (one, same) = (r#"{"a":1,"b":[2]}"#, "{ \"b\": [ 2 ],\n \"\\u0061\": 1 }");
        for json in ["application/json", "Application/JSON; charset=utf-8", "application/vnd.shop+json"] {
            assert_eq!(of(&recipe, json, one), of(&recipe, json, same));
            assert_ne!(of(&Recipe::new(), json, one), of(&Recipe::new(), json, same));
        }
        assert_ne!(of(&recipe, "text/plain", one), of(&recipe, "text/plain", same));
        assert_ne!(of(&recipe, "application/json", "{"), of(&recipe, "application/json", "{ "));
    }
}
