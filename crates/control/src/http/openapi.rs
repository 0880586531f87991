//! The description of the API, generated from the handlers and the types. Nothing is written twice.

use std::sync::LazyLock;

use axum::response::{IntoResponse as _, Response};
use http::{HeaderValue, header};
use utoipa::OpenApi;
use utoipa::openapi::security::{ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityScheme};

#[derive(OpenApi)]
#[openapi(
    info(title = "SPACE", description = "Untrusted programs, each in a microVM of its own. See docs/api.md for what a schema \
        cannot say.", license(name = "Apache-2.0", identifier = "Apache-2.0")),
    paths(
        super::health, serve, super::operations::info,
        super::sandboxes::list, super::sandboxes::create, super::sandboxes::get, super::sandboxes::patch,
        super::sandboxes::delete, super::sandboxes::console,
        super::operations::list, super::operations::get,
        super::commands::create, super::commands::attach, super::commands::processes, super::commands::process,
        super::commands::signal, super::output::output,
        super::transfer::read, super::transfer::write, super::files::remove, super::files::info, super::files::list, super::watch::watch,
        super::files::make_directory, super::files::rename, super::transfer::read_archive, super::transfer::write_archive,
        super::templates::list, super::templates::build, super::templates::get, super::templates::delete,
        super::templates::tag,
        super::keys::list, super::keys::create, super::keys::revoke,
    ),
    components(schemas(space_api::Problem)),
    modifiers(&Security, &Names),
    security(("bearer" = []), ("api_key" = [])),
    tags((name = "server"), (name = "sandboxes"), (name = "operations"), (name = "commands"), (name = "processes"),
        (name = "files"), (name = "templates"), (name = "keys")),
)]
struct Description;

/// Handlers have short names within their module; with the tag they are unique.
struct Names;

impl utoipa::Modify for Names {
    fn modify(&self, api: &mut utoipa::openapi::OpenApi) {
        for item in api.paths.paths.values_mut() {
            let methods =
                [&mut item.get, &mut item.put, &mut item.post, &mut item.delete, &mut item.patch].into_iter().flatten();
            for operation in methods {
                let tag = operation.tags.as_ref().and_then(|tags| tags.first()).cloned().unwrap_or_default();
                let name = operation.operation_id.clone().unwrap_or_default();
                operation.operation_id = Some(format!("{tag}_{name}"));
            }
        }
    }
}

struct Security;

impl utoipa::Modify for Security {
    fn modify(&self, api: &mut utoipa::openapi::OpenApi) {
        let components = api.components.get_or_insert_default();
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some("An API key, `sk-…`")).build();
        components.add_security_scheme("bearer", SecurityScheme::Http(bearer));
        components
            .add_security_scheme("api_key", SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("X-API-Key"))));
    }
}

/// The OpenAPI 3.1 document.
pub fn document() -> utoipa::openapi::OpenApi {
    let mut api = Description::openapi();
    api.info.version = env!("CARGO_PKG_VERSION").to_owned();
    api
}

/// This description.
#[utoipa::path(get, path = "/openapi.json", operation_id = "description", tag = "server", security(()),
    responses((status = 200, description = "OpenAPI 3.1", body = Object)))]
pub async fn serve() -> Response {
    static TEXT: LazyLock<String> = LazyLock::new(|| document().to_json().expect("the description is plain data"));
    let json = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, json)], TEXT.as_str()).into_response()
}
