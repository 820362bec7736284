"""GET /docs: the API as a page, from the server's own description of it."""


def test_every_route_is_shown_and_opens_to_its_fields(visit, server):
    page = visit()
    page.goto(f"{server.url}docs")
    page.wait_for_selector("#routes > details")
    api = page.evaluate("fetch('openapi.json').then(answer => answer.json())")
    assert page.locator("#routes > details").count() == sum(len(item) for item in api["paths"].values())
    chat = page.locator("#routes > details", has_text="/v1/chat/completions")
    chat.locator("> summary").click()
    assert chat.locator("code.needed").first.inner_text() == "messages"
    assert "curl " in chat.locator("pre").inner_text()
    assert f"{server.url}v1/chat/completions" in chat.locator("pre").inner_text()
    page.fill("#filter", "/v1/embed")
    assert page.locator("#routes > details:visible").count() == 1


def test_the_docs_page_requests_the_key(visit, server):
    def guard(route):
        if route.request.headers.get("authorization") == "Bearer secret":
            route.fallback()
        else:
            route.fulfill(status=401, json={"error": {"message": "Wrong key."}})

    page = visit()
    page.context.route("**/openapi.json", guard)
    page.goto(f"{server.url}docs")
    page.wait_for_selector("#key-field:focus")
    page.keyboard.type("secret")
    page.keyboard.press("Enter")
    page.wait_for_selector("#routes > details")
    assert not page.is_visible("#key")
