"""`turbojax chat`: the conversation that the model sees."""


def seen(pipes):
    """The contents of each call's messages."""
    return [[(m["role"], m["content"]) for m in prompt] for prompt, _, _ in pipes[0].calls]


def test_the_whole_conversation_is_sent(run, pipes):
    result = run("chat", "--system", "be brief", input="hello you\n\nagain\n/exit\nnever sent\n")
    assert result.exit_code == 0
    system, first = ("system", "be brief"), ("user", "hello you")
    assert seen(pipes) == [
        [system, first],
        [system, first, ("assistant", "HELLO YOU"), ("user", "again")],
    ]
    assert "HELLO YOU\n" in result.stdout
    assert pipes[0].is_closed


def test_clear_starts_over_and_the_end_of_input_leaves(run, pipes):
    result = run("chat", "--system", "s", input="one\n/clear\ntwo\n")
    assert result.exit_code == 0
    assert seen(pipes)[1] == [("system", "s"), ("user", "two")]


def test_an_unknown_command_is_not_sent(run, pipes):
    result = run("chat", input="/what\n/exit\n")
    assert pipes[0].calls == []
    assert result.stderr.count("/clear") == 2


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(run, pipes):
    result = run("chat", input="one two interrupt three\nnext\n/exit\n")
    assert result.exit_code == 0
    assert pipes[0].num_cancelled == 1
    assert seen(pipes)[1][1] == ("assistant", "ONE TWO")


def test_a_failed_answer_does_not_end_the_chat(run, pipes):
    result = run("chat", input="please fail\nnext\n/exit\n")
    assert result.exit_code == 0
    assert "error: out of pages" in result.stderr
    assert seen(pipes)[1] == [("user", "next")]


def test_a_lost_engine_ends_the_chat(run, pipes):
    result = run("chat", input="lost\nnever sent\n")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "error: the device is lost: no device"
    assert len(pipes[0].calls) == 1
